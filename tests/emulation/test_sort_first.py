"""Whole layers from tokens: backward that sorts rows by a copy, and backward that gathers them, compiled."""

from unittest import mock

import pytest
import torch
from cases import moe
from cases.moe import Case, Inputs
from emulation.layers import emulated

from bench.oracle.tolerance import assert_close
from fusedmlp.kernels.tiles import table

CASES = {
    "swiglu": {"ids": "random"},  # some of other ranks: their rows are NaN
    "biases, gpt-oss": {
        "bias": True,
        "options": {"interleaved": True, "limit": 7.0, "alpha": 1.702, "linear_offset": 1.0},
    },
    "overwrite": {"mode": "overwrite", "K": 3},
    "in_out": {"layout": "in_out", "dtype": torch.float16},
}


QUICK = {("swiglu", False), ("overwrite", True)}
CELLS = [
    pytest.param(kind, large, marks=[] if (kind, large) in QUICK else [pytest.mark.exhaustive])
    for kind in CASES
    for large in (False, True)
]


def ran(inputs, rule, large):
    """Results of a case, and the launches of its backward."""
    rules = {key: table.SortFirst(*rule) for key in table.SORT_FIRST if rule}
    with mock.patch.dict(table.SORT_FIRST, rules, clear=True):
        with emulated("sm_90", warp_specialized=True, large=large) as launched:
            results = moe.run(inputs, "triton")
    names = [each.kernel.removeprefix("_").removeprefix("grouped_").removesuffix("_kernel") for each in launched]
    return results, names


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("kind", "large"), CELLS)
def test_layer_from_tokens(kind, large):
    case = Case(
        **{"T": 150, "K": 2, "E": 3, "H": 128, "F": 64, "dtype": torch.bfloat16, "mode": "main_grad"} | CASES[kind]
    )
    inputs = Inputs(case)
    expected, low_precision = moe.reference(inputs, torch.float64), moe.reference(inputs, case.dtype)
    found, names = ran(inputs, (1, 0), large)
    assert names.count("spread") == 2
    assert names[-2:] == ["gemm_warp_specialized", "combine"]  # dx comes last
    assert_close(found, expected, low_precision, case.dtype)
    gathered, names = ran(inputs, None, large)
    assert "spread" not in names
    assert_close(gathered, expected, low_precision, case.dtype)
    for name in ("y", "dx", "dprobs"):
        assert torch.equal(found[name], gathered[name]), name
