"""The M-ragged GEMM by itself, on every path: loads, layouts and places of the weights, padding, biases."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import experts
from cases.experts import DEVICE, INTERPRETED
from cases.factory import Case, Inputs
from cases.gemm import check, run

from fusedmlp.kernels.gemm import launch as gemm_launch
from fusedmlp.kernels.operands import descriptors
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors

pytestmark = pytest.mark.sparse
LOADS = {
    "ragged": (3, 0, 17, 1, 40),
    "single rows": (1, 0, 1, 1),
    "empty": (0, 0, 0),
    "one expert": (37,),
    "last only": (0, 0, 33),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_loads_and_layouts_on_every_path(load, layout, dtype, monkeypatch):
    case = Case(counts=LOADS[load], padding=21, H=80, F=48, layout=layout, dtype=dtype)
    _, by_tma = check(case)
    monkeypatch.setattr(descriptors, "fits", lambda array: False)
    _, by_pointer = check(case, best="pointer")
    monkeypatch.setattr(gemm_launch, "vectors_fit", lambda *_: False)
    _, unaligned = check(case, best="unaligned")
    if INTERPRETED:
        assert torch.equal(by_tma, by_pointer)
        assert torch.equal(by_tma, unaligned)


@pytest.mark.parametrize("where", experts.PLACES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_places_of_weights_and_biases(where, layout):
    case = Case(counts=(3, 0, 17, 1, 40), H=80, F=24, layout=layout, dtype=torch.bfloat16)
    check(case, where, biases=where, best=experts.PLACES[where])


@pytest.mark.parametrize(("H", "F"), [(1, 1), (7, 5), (33, 35), (8, 3), (24, 4)])
def test_odd_sizes(H, F):
    aligned = all(size * 2 % 16 == 0 for size in (H, 2 * F))
    check(Case(counts=(5, 18, 0, 1), padding=3, H=H, F=F, dtype=torch.bfloat16), best="tma" if aligned else "unaligned")


@pytest.mark.parametrize(("bias", "scale"), [(False, False), (True, False), (True, True)])
def test_bias_and_scale(bias, scale):
    check(Case(counts=(5, 18, 0, 1), padding=3, H=40, F=40), bias=bias, scale=scale)


def test_rows_at_odd_addresses_are_not_loaded_as_vectors():
    case = Case(counts=(5, 18), padding=3, H=48, F=40, dtype=torch.bfloat16)
    inputs = Inputs(case)
    flat = torch.empty(inputs.x.numel() + 1, dtype=torch.bfloat16, device=DEVICE)
    inputs.x, aligned = flat[1:].view(inputs.x.shape).copy_(inputs.x), inputs.x
    y, _ = run(inputs, best="unaligned")
    inputs.x = aligned
    torch.testing.assert_close(y, run(inputs)[0])


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_experts_that_share_a_matrix_go_by_pointers(layout, monkeypatch):
    """TMA takes no stride of zero."""
    inputs = Inputs(Case(counts=(5, 0, 12), padding=4, H=48, F=40, layout=layout, dtype=torch.bfloat16))
    inputs.fc1[1:] = inputs.fc1[0].clone()
    expected, _ = run(inputs, bias=False)
    shared = ExpertTensors.of([inputs.fc1[0].to(DEVICE)] * 3, 2)
    assert shared.table is None
    assert shared.stride_e == 0
    monkeypatch.setattr(experts, "place", lambda *_: shared)
    torch.testing.assert_close(run(inputs, bias=False, best="pointer")[0], expected)


@pytest.mark.parametrize("strides", [(0, 1), (-8, 1), (8, 2), (4, 1), (8, 0)])
def test_what_tma_cannot_step_through_has_no_descriptor(strides):
    fitting = Array((5, 8), (8, 1), torch.bfloat16, 0, 0)
    assert descriptors.fits(fitting)
    assert not descriptors.fits(replace(fitting, strides=strides))


def test_a_row_with_infinities_stays_alone():
    inputs = Inputs(Case(counts=(5, 0, 12), padding=4, H=40, F=40))
    inputs.x[6] = float("inf")
    inputs.fc1[1] = float("nan")  # the expert without rows
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        y, _ = run(inputs)
    assert y[[0, 1, 2, 3, 4, 5, *range(7, 21)]].isfinite().all()


def test_weights_of_the_last_expert_do_not_reach_padding_rows():
    inputs = Inputs(Case(counts=(5, 0), padding=30, H=40, F=40))
    inputs.fc1[1], inputs.bias1[1] = float("inf"), float("nan")
    assert (run(inputs)[0][5:] == 0).all()


def test_cost_counts_owned_rows_and_experts_with_rows():
    _, launch = run(Inputs(Case(counts=(5, 0, 12), padding=4, H=40, F=16)))
    cost = launch.cost_of((5, 0, 12))
    assert cost.flops == 2 * 17 * 40 * 32
    assert cost.bytes == 4 * (17 * (40 + 32) + 2 * 32 * (40 + 1))
