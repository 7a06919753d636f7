"""Quantization to 8 bits: bytes of elements and scales, wherever copies have them, against PyTorch's definitions."""

from dataclasses import replace

import pytest
import torch
from cases.quantize import FLOAT_MAX, UNWRITTEN, Case, check, run, special, values

from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.tiles import select, table
from fusedmlp.kernels.warp_specialized import stages
from fusedmlp.recipe import BLOCKS

LOADS = {
    "ragged": ((130, 0, 70, 1), 5),
    "single rows": ((1, 0, 1, 1), 0),
    "empty": ((0, 0, 0), 7),
    "whole tiles": ((128, 256), 0),
    "last only": ((0, 0, 33), 130),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
pytestmark = pytest.mark.parametrize("recipe", BLOCKS)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loads_and_special_values(recipe, load, dtype):
    counts, padding = LOADS[load]
    check(Case(recipe, counts=counts, padding=padding, dtype=dtype))


@pytest.mark.parametrize("C", [32, 96, 128, 160, 352])
def test_columns_that_128_does_not_divide(recipe, C):
    check(Case(recipe, counts=(40, 3), C=C))


@pytest.mark.parametrize("row_ids", [torch.int32, torch.int64], ids=str)
def test_gathered_rows(recipe, row_ids):
    check(Case(recipe, row_ids=row_ids))


@pytest.mark.parametrize("row_ids", [None, torch.int32], ids=str)
@pytest.mark.parametrize("row_copy", [True, False])
def test_one_copy_leaves_the_other_alone(recipe, row_copy, row_ids):
    check(Case(recipe, row_copy=row_copy, token_copy=not row_copy, row_ids=row_ids))


def test_rows_at_odd_addresses_and_strides(recipe):
    x = values(40, 163, torch.bfloat16)[:, 3:]
    check(Case(recipe, counts=(23, 17), padding=0), x)


def around(edges):
    """The magnitudes and their neighbours in float32."""
    bits = torch.tensor([edge for edge in edges if edge <= FLOAT_MAX], dtype=torch.float32).view(torch.int32)
    return torch.cat([bits - 2, bits - 1, bits, bits + 1, bits + 2]).clamp(0, 0x7F800000).view(torch.float32)


@pytest.mark.parametrize("along", ["rows", "tokens"])
def test_every_boundary_between_scales(recipe, along):
    """One magnitude for each block, around all powers of two and all of these times 448: the second are boundaries."""
    amax = around([c * 2.0**k for c in (1, 448) for k in range(-149, 128)])
    amax = torch.cat([amax, amax.new_tensor([0.0, 3e38, FLOAT_MAX, torch.inf])])
    lines = torch.randperm(len(amax), generator=torch.Generator().manual_seed(0))
    amax, block = amax[lines], BLOCKS[recipe]
    amax = torch.cat([amax, amax.new_zeros(-len(amax) % 128)])
    x = torch.ldexp(values(len(amax), 128), torch.frexp(amax)[1][:, None] - 26).clamp(-amax[:, None], amax[:, None])
    for start in range(0, 128, block):
        x[:, start + start // block] = amax * (-1) ** (start // block)
    if along == "rows":
        check(Case(recipe, counts=(len(amax),), padding=0, C=128, token_copy=False), x)
    else:
        check(Case(recipe, counts=(128,), padding=0, C=len(amax), row_copy=False), x.T.contiguous())


@pytest.mark.parametrize(
    ("architecture", "dtype", "columns", "offset", "on_sm_90"),
    [
        ("sm_90", torch.bfloat16, 160, 0, True),
        ("sm_90", torch.float16, 160, 0, True),
        ("sm_90", torch.float32, 160, 0, False),
        ("sm_90", torch.bfloat16, 152, 0, False),  # no multiple of 16 elements
        ("sm_90", torch.bfloat16, 160, 8, False),  # nor of 16 bytes
        ("sm_100", torch.bfloat16, 160, 0, False),
        ("interpreter", torch.bfloat16, 160, 0, False),
    ],
)
def test_where_tiles_are_staged_in_shared_memory(recipe, architecture, dtype, columns, offset, on_sm_90):
    target = select.Target(architecture, 3, table.TABLES[architecture])
    x = Array((100, columns), (columns, 1), dtype, offset, 0)
    assert stages(target, recipe, (x,)) == (on_sm_90 and recipe == "fp8_block")
    assert not stages(target, recipe, (x, Array((100, 64), (72, 1), dtype, 0, 0)))


def test_an_expert_sees_nothing_of_others(recipe):
    """Rows of the next expert, and padding rows, change no byte of a tile."""
    case = Case(recipe, counts=(70, 40), padding=9)
    x = torch.cat([special(110, case.C, case.dtype), torch.full((9, case.C), torch.nan, dtype=case.dtype)])
    (_, before), _ = run(x, case)
    x[70:] = torch.inf
    (_, after), _ = run(x, case)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8))
        assert not torch.equal(one[1].view(torch.uint8), other[1].view(torch.uint8))
    assert (before.elements[2:].view(torch.uint8) == UNWRITTEN).all()


@pytest.mark.parametrize("change", [{"counts": (0,), "padding": 0}, {"C": 0}], ids=str)
def test_nothing_to_quantize(recipe, change):
    _, launches = run(
        torch.empty(0 if "counts" in change else 206, change.get("C", 160)), replace(Case(recipe), **change)
    )
    assert launches == []


@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("row_ids", [None, torch.int32], ids=str)
def test_cost_counts_owned_rows_and_whole_tiles(recipe, copies, row_ids):
    case = Case(recipe, row_copy=copies[0], token_copy=copies[1], row_ids=row_ids)
    _, (launch,) = check(case)
    cost, (rows, tokens) = launch.cost_of(case.counts), copies
    scales = 4 * 2 * 512  # tiles, chunks
    read = 201 * 160 * 2 + (201 * 4 if row_ids else 0)
    assert cost.bytes == read + rows * (201 * 160 + scales) + tokens * (4 * 128 * 160 + scales)
    assert cost.flops == (rows + tokens) * 201 * 160
