"""wgrad of 8-bit token copies by itself, against float64 of the dequantized operands."""

from dataclasses import dataclass

import torch

from cases import accumulation, quantize, wgrad
from cases.experts import DEVICE
from cases.gemm_quantized import PROMOTED
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.operands.quantized import TILE_ROWS, Quantized
from fusedmlp.kernels.routing.plan import max_tiles
from fusedmlp.kernels.tiles.table import Path, Recipe
from fusedmlp.kernels.wgrad.quantized_launch import grouped_wgrad_quantized_
from fusedmlp.operators import torch_quantize
from fusedmlp.recipe import BLOCKS


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    segments: tuple[tuple[int, ...], ...] = ((70, 0, 150, 1, 33),)  # rows of every expert
    padding: int = 9
    N: int = 288
    K: int = 416
    accumulate: bool = True
    place: str = "packed"  # of `wgrad.PLACES`
    dtype: torch.dtype = torch.float32  # of main_grad
    spread: int = 4  # powers of two between the magnitudes of tokens in a tile
    positive: bool = False  # all operands are, so that no errors cancel
    path: Path = "warp_specialized"


def _operand(case, C, generator):
    """Token copies on the CPU with NaN in tiles past the last, dequantized rows of every expert, and numbers of tiles.

    The rows of a segment fill whole tiles, with zeros, as in its copy.
    """
    copies, experts, block = [], [[] for _ in case.segments[0]], (BLOCKS[case.recipe], 1)
    for counts in case.segments:
        owned = sum(counts)
        x = torch.randn(owned, C, generator=generator)
        # Magnitudes that differ by column and by block of tokens, so that no scale can stand in for another.
        x = torch.ldexp(x, torch.randint(-3, 4, (1, C), generator=generator))
        x = torch.ldexp(x, torch.arange(owned)[:, None] // 25 % 5 * case.spread // 4 - 2).bfloat16()
        x = x.abs() if case.positive else x
        num_tiles = max_tiles(owned + case.padding, len(counts), TILE_ROWS)
        _, copy = quantize.expected(x, quantize.Case(case.recipe, counts, case.padding, C), num_tiles)
        used = sum(-(-count // TILE_ROWS) for count in counts)
        copy.elements[used:].view(torch.uint8)[:] = 0x7F  # NaN
        copy.scales[used:].view(torch.uint8)[:] = 0xFF  # NaN, in fp32 and in E8M0
        copies.append((copy, num_tiles))
        for e, rows in enumerate(x.split(counts)):
            if len(rows):
                rounded = torch_quantize.quantize(rows, case.recipe, block).dequantize(block)
                experts[e].append(accumulation.whole(rounded, TILE_ROWS))
    together = Quantized(*(torch.cat([getattr(c, f) for c, _ in copies]) for f in Quantized._fields))
    values = [torch.cat(tiles) if tiles else torch.zeros(0, C, dtype=torch.float64) for tiles in experts]
    return together, values, [n for _, n in copies]


def check(case):
    """All of main_grad within what its sums may lose, and not a bit around it.

    Returns the largest error as a multiple of what is allowed.
    """
    generator = torch.Generator().manual_seed(0)
    dy, dy_values, tiles = _operand(case, case.N, generator)
    x, x_values, _ = _operand(case, case.K, generator)
    num_experts = len(case.segments[0])
    flat, experts = wgrad.main_grad(case.place, num_experts, case.N, case.K, case.dtype)
    if not case.accumulate:
        for expert in experts:
            expert.fill_(torch.nan)
    group = experts
    if "packed" in case.place:
        size = experts[0].shape.numel()
        group = [experts[0].as_strided((num_experts, *experts[0].shape), (size, *experts[0].stride()))]
    offsets = [
        torch.tensor([sum(c[:e]) for e in range(num_experts + 1)], dtype=torch.int32, device=DEVICE)
        for c in case.segments
    ]
    operands = [Quantized(*(t.to(DEVICE) for t in copy)) for copy in (dy, x)]
    with recording() as log:
        dw_ENK = ExpertTensors.of(group, 2)
        grouped_wgrad_quantized_(dw_ENK, *operands, offsets, tiles, case.recipe, accumulate=case.accumulate)
    launches = [launch for launch in log if launch.chosen]
    suffix = "_triton" if case.path == "pointer" else ""
    assert [(launch.name, launch.path) for launch in launches] == [(f"grouped_wgrad_{case.recipe}{suffix}", case.path)]
    initial = wgrad.UNTOUCHED if case.accumulate else 0.0
    worst = 0.0
    for e, (dw, left, right) in enumerate(zip(experts, dy_values, x_values, strict=True)):
        want = initial + left.T @ right
        lost = accumulation.lost(left, right, accumulation.sums_of(8), PROMOTED[case.recipe])
        half_ulp = torch.ldexp(torch.ones_like(want), torch.frexp(want)[1] - (25 if dw.dtype == torch.float32 else 9))
        error, allowed = (dw.cpu().double() - want).abs(), half_ulp + lost
        excess = float((error / allowed).nan_to_num(nan=torch.inf).max())
        assert excess <= 1, f"expert {e}: error {excess:.3g} times what is allowed"
        worst = max(worst, excess)
        if case.accumulate and not len(left):
            assert (dw == wgrad.UNTOUCHED).all()
        dw.fill_(wgrad.UNTOUCHED)
    assert (flat == wgrad.UNTOUCHED).all()  # nothing around it was written
    return worst
