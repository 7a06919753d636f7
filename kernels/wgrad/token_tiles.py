"""The tiles of token copies that wgrad goes through for every expert, made by one launch.

Token copies of several segments (micro-batches) lie in one buffer, one after the other, each with room for as many
tiles as its load can have. An expert's steps are its tiles of all segments, in the order of the segments, so the
loop over them is one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launching.program import Builder
from ..operands.arrays import Array
from ..operands.quantized import TILE_ROWS
from ..routing.plan import EXPERTS_PER_PROGRAM, sizes_of_plan
from ..routing.plan_kernel import write_order

_BLOCK_T = 256  # steps that are written at once


@triton.jit
def _rows_of_experts(offsets_ptr, segments_ptr, s, g, NUM_EXPERTS: tl.constexpr):
    """Rows of each expert in segment s."""
    offsets = offsets_ptr
    if segments_ptr is not None:
        offsets = tl.load(segments_ptr + s).to(tl.pointer_type(tl.int32))
    mask = g < NUM_EXPERTS
    return tl.load(offsets + g + 1, mask=mask, other=0) - tl.load(offsets + g, mask=mask, other=0)


@triton.jit(do_not_specialize=["num_segments"])
def _wgrad_token_tiles_kernel(
    offsets_ptr,
    segments_ptr,
    order_ptr,
    steps_ptr,
    num_segments,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write `order` and `steps` (see `TokenTiles`), a program for each expert, from `offsets` `[E + 1]` int32 or, for
    several segments, from `segments` `[2, S]` int64: addresses of offsets, first tiles.
    """
    program = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    rows_g, step = tl.zeros((BLOCK_G,), tl.int32), 0
    for s in range(0, num_segments):
        own_g = _rows_of_experts(offsets_ptr, segments_ptr, s, g, NUM_EXPERTS)
        step += tl.sum(tl.where(g < program, tl.cdiv(own_g, TILE_ROWS), 0), 0)
        rows_g += own_g
    if order_ptr is not None:
        own = program * BLOCK_E < NUM_EXPERTS
        if own:
            write_order(program, rows_g, order_ptr, NUM_EXPERTS, BLOCK_G, BLOCK_E)
    tl.store(steps_ptr + program, step)
    for s in range(0, num_segments):
        tiles_g = tl.cdiv(_rows_of_experts(offsets_ptr, segments_ptr, s, g, NUM_EXPERTS), TILE_ROWS)
        tile = tl.sum(tl.where(g < program, tiles_g, 0), 0)
        if segments_ptr is not None:
            tile += tl.load(segments_ptr + num_segments + s).to(tl.int32)
        tiles = tl.sum(tl.where(g == program, tiles_g, 0), 0)
        for start in range(0, tiles, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            tl.store(steps_ptr + NUM_EXPERTS + 1 + step + t, tile + t, mask=t < tiles)
        step += tiles
    tl.store(steps_ptr + program + 1, step)  # the next program stores the same


class TokenTiles(NamedTuple):
    """Order and steps of wgrad over token copies, int32."""

    order: Any  # [E + 1]: experts by falling number of rows, then how many have rows
    steps: Any  # [E + 1] first steps of experts, then the tile of each step


def plan_token_tiles(
    builder: Builder, offsets: Sequence[Array], max_tiles: Sequence[int], num_experts: int, order: Array | None = None
) -> TokenTiles:
    """Plan the launch. `offsets`: of every segment, first rows `[E + 1]` or a plan; `max_tiles`: the tiles that its
    copies have room for; `order`: of a plan with one segment.
    """
    segments, num_segments = None, len(offsets)
    if num_segments > 1:
        first_tiles = [sum(max_tiles[:s]) for s in range(num_segments)]
        segments, order = builder.addresses((*offsets, *first_tiles)), None
    made = builder.empty((num_experts + 1,), torch.int32) if order is None else None
    # One element more: the kernel reads a step ahead, for an expert without rows as well.
    steps = builder.empty((num_experts + 2 + sum(max_tiles),), torch.int32)
    arguments = {
        "offsets_ptr": offsets[0],
        "segments_ptr": segments,
        "order_ptr": made,
        "steps_ptr": steps,
        "num_segments": num_segments,
        "NUM_EXPERTS": num_experts,
        "TILE_ROWS": TILE_ROWS,
        "BLOCK_G": sizes_of_plan(num_experts, ())["BLOCK_G"],
        "BLOCK_E": EXPERTS_PER_PROGRAM,
        "BLOCK_T": _BLOCK_T,
    }
    builder.launch(_wgrad_token_tiles_kernel, (num_experts,), arguments, num_warps=8)
    return TokenTiles(made if order is None else order, steps)
