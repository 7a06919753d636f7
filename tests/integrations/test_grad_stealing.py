"""PyTorch takes the GEMM's own memory as `.grad`, whatever hooks there are (PyTorch PR 13337).

Checked by pointer, and by operators and allocations inside AccumulateGrad; every cell also by float64 autograd.
`tests/contract/test_stock_pytorch.py` has the cells without modules and DDP.
"""

import pytest
from support.grids import only_pairs
from support.world import launch


@pytest.mark.slow
def test_no_hook_makes_pytorch_copy_a_weight_gradient(tmp_path):
    for count, failures, held in launch("integrations.grad_stealing:run_all", 2, tmp_path, only_pairs()):
        assert failures == {}
        assert count == (32 if only_pairs() else 180)
        # One hook does: it wants all gradients at once, and holds all but the last of 2 weights, or of 2 of 3 experts.
        assert held == [2 - 1, 2 * 3 - 1]
