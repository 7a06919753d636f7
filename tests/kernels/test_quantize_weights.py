"""Weights in 8 bits: bytes of elements and scales of both copies, wherever weights lie, against PyTorch."""

import pytest
import torch
from cases import experts
from cases.quantize import FLOAT_MAX
from cases.quantize_weights import Case, blocks, check, run

from fusedmlp.operators import torch_quantize
from fusedmlp.recipe import BLOCKS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
pytestmark = pytest.mark.parametrize("recipe", BLOCKS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_special_values(recipe, dtype, layout):
    check(Case(recipe, dtype=dtype, layout=layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_place_has_scales_of_its_own(recipe, dtype):
    case = Case(recipe, sizes=(2, 256, 384), dtype=dtype)
    copies, _ = check(case, blocks(case.sizes, dtype))
    for _, scales in copies:
        here, right, below = (scales[:, i, j].float() for i, j in ((0, 0), (0, 1), (1, 0)))
        for one, other in ((here, right), (here, below), (right, below), (here[0], here[1])):
            assert (one != other).float().mean() > 0.8  # the last pair: two experts


@pytest.mark.parametrize("where", experts.PLACES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_places_of_experts(recipe, where, layout):
    check(Case(recipe, sizes=(3, 128, 256), where=where, layout=layout))


@pytest.mark.parametrize("sizes", [(1, 128, 128), (2, 384, 128), (2, 160, 288), (3, 32, 96), (1, 96, 32)], ids=str)
def test_sizes(recipe, sizes):
    check(Case(recipe, sizes=sizes), blocks(sizes, torch.bfloat16))
    check(Case(recipe, sizes=sizes, layout="in_out"))


@pytest.mark.parametrize("columns", [slice(40, 168), slice(3, 131), slice(0, 256, 2)], ids=str)
def test_columns_of_wider_weights(recipe, columns):
    w = blocks((2, 130, 256), torch.bfloat16)[:, 1:129, columns]
    assert not w.is_contiguous()
    check(Case(recipe, sizes=(2, 128, 128)), w)


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("by_in", [True, False])
def test_one_copy_leaves_the_other_alone(recipe, by_in, layout):
    check(Case(recipe, by_in=by_in, by_out=not by_in, layout=layout))


@pytest.mark.slow
def test_boundaries_between_scales(recipe):
    """One magnitude for each block: powers of two, these times 448, and their neighbours in bf16."""
    powers = [-133, -130, -127, -126, -119, -118, -9, -8, 0, 1, 8, 119]
    edges = torch.tensor([c * 2.0**p for c in (1, 448) for p in powers if c * 2.0**p <= FLOAT_MAX]).bfloat16()
    amax = torch.stack([edges.view(torch.int16) + step for step in (-1, 0, 1)]).view(torch.bfloat16).flatten().float()
    block, size = BLOCKS[recipe], len(amax)
    rows = 128 if recipe == "fp8_block" else 32
    sign = 1.0 - 2.0 * (torch.arange(size * rows * 128) % 3 == 0)
    w = sign.view(size, rows, 128) * amax[:, None, None] * torch.tensor([1.0, 0.25, 0.75]).repeat(43)[:128]
    w[:, :, block - 1 :: block] = amax[:, None, None]
    check(Case(recipe, sizes=(size, rows, 128)), w.bfloat16())


@pytest.mark.parametrize("sizes", [(2, 256, 384), (2, 160, 288)], ids=str)
def test_copies_are_those_of_the_cpu(recipe, sizes):
    """Bits of `impl="torch"`, whose layers multiply the values of both copies."""
    if recipe == "fp8_block" and sizes[1] % 128:
        sizes = (3, 128, 256)
    w = blocks(sizes, torch.bfloat16)
    copies, _ = run(w, Case(recipe, sizes=sizes))
    expected = torch_quantize.quantize_weights([w], recipe)
    for copy, (elements, scales), transposed in zip(copies, (expected[:2], expected[2:]), (True, False), strict=True):
        assert torch.equal(copy.elements.cpu().view(torch.uint8), elements.view(torch.uint8))
        assert torch.equal(copy.scales.cpu(), scales)
        found = torch_quantize.dequantized_weights([elements, scales], recipe)
        (same,) = torch_quantize.rounded_weights([w], recipe, transposed)
        assert torch.equal(found, same if transposed else same.mT)


def test_no_copy_needs_no_launch(recipe):
    assert run(blocks((1, 128, 128)), Case(recipe, sizes=(1, 128, 128), by_in=False, by_out=False))[1] == []
    assert run(torch.empty(2, 0, 128), Case(recipe, sizes=(2, 0, 128)))[1] == []


@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cost_counts_weights_copies_and_scales(recipe, copies, dtype):
    case = Case(recipe, sizes=(2, 160, 288), dtype=dtype, by_in=copies[0], by_out=copies[1])
    _, (launch,) = check(case)
    cost, size = launch.cost_of((5, 0)), 2 * 160 * 288
    scales = 2 * 2 * 3 * (512 if recipe == "mxfp8" else 4)
    assert cost.bytes == size * dtype.itemsize + sum(copies) * (size + scales)
    assert cost.flops == size * (sum(copies) if recipe == "mxfp8" else 1)
