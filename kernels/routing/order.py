"""The order of routed rows: from the experts that every token chose, `id[i]` of flat position `i = t * K + k`, to

    places[i] = |{j : id[j] < id[i]}| + |{j < i : id[j] = id[i]}|,    slots = its inverse,

and, for every row, its token, `slots[r] // K`, and its probability.

This is a stable sort by counting, in two launches: every block of positions counts its ids; then every block adds up
the counts of the blocks before it, sorts its own positions, and so knows their rows. Beside these, programs make the
plan of the launches to come (`routing/plan.py`). No atomics on memory: the same bits every run. Ids outside `[0, E)`
count as E, so rows of experts that are elsewhere come last, as padding.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands.arrays import Array
from ..tiles.rounding import cdiv, power_of_2
from ..tiles.table import row_blocks
from .plan import num_plan_programs, size_of_plan, sizes_of_plan
from .plan_kernel import groups_of_counts, write_plan
from .sort import sort

# Positions that are counted or sorted at once, and counts that are added up at once.
_PART, _SUMMED = 1024, 4096
# Upper bound on the number of blocks, as each block reads the counts of all: with more positions blocks are longer.
_MOST_BLOCKS = 128


class RowOrder(NamedTuple):
    """Positions by expert, stable in their order; rows of no expert come last."""

    plan: Any  # see plan.py
    row_ids: Any  # [R] int32: the token of every row
    places: Any  # [R] int32: the row of every flat position
    probs: Any  # [R]: of every row


@triton.jit
def _load_experts(ids_ptr, position, num_positions, NUM_EXPERTS: tl.constexpr):
    """Experts of positions; E for ids outside `[0, E)`, E + 1 past the last position."""
    inside = position < num_positions
    ids = tl.load(ids_ptr + position, mask=inside, other=0).to(tl.int64)  # before any comparison: ids may have 8 bits
    experts = tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, NUM_EXPERTS)
    return tl.where(inside, experts, NUM_EXPERTS + 1).to(tl.int32)


@triton.jit(do_not_specialize=["num_positions", "block"])
def _routing_counts_kernel(
    ids_ptr, counts_ptr, num_positions, block, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, PART: tl.constexpr
):
    """Count the ids of each block of positions: `ids` `[num_positions]`, `counts` `[blocks, E + 1]` int32."""
    first = tl.program_id(0).to(tl.int64) * block
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, block, PART):
        position = first + start + tl.arange(0, PART)
        counts += tl.histogram(_load_experts(ids_ptr, position, num_positions, NUM_EXPERTS), BINS)
    tl.store(counts_ptr + tl.program_id(0) * (NUM_EXPERTS + 1) + bins, counts, mask=bins <= NUM_EXPERTS)


@triton.jit
def _sum_counts(counts_ptr, program, num_blocks, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, SUMMED: tl.constexpr):
    """`(counts of all blocks, counts of the blocks before that of `program`)`, `[BINS]` each."""
    BLOCK_B: tl.constexpr = max(1, SUMMED // BINS)
    bins = tl.arange(0, BINS)
    totals, before = tl.zeros((BINS,), dtype=tl.int32), tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)
        mask = (blocks < num_blocks)[:, None] & (bins <= NUM_EXPERTS)[None, :]
        counts_BE = tl.load(counts_ptr + blocks[:, None] * (NUM_EXPERTS + 1) + bins[None, :], mask=mask, other=0)
        totals += tl.sum(counts_BE, 0)
        before += tl.sum(tl.where((blocks < program)[:, None], counts_BE, 0), 0)
    return totals, before


@triton.jit(do_not_specialize=["num_positions", "num_blocks", "block", "top_k"])
def _routing_places_kernel(
    ids_ptr,
    probs_ptr,
    counts_ptr,
    plan_ptr,
    tokens_ptr,
    rows_ptr,
    row_probs_ptr,
    num_positions,
    num_blocks,
    block,
    top_k,
    BINS: tl.constexpr,
    SUMMED: tl.constexpr,
    PART: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Place the positions of one block or, in programs after those, write a plan.

    `ids`, `probs` and `rows` `[T * K]` by position; `counts` `[num_blocks, E + 1]`; `tokens` and `row_probs` `[R]` by
    row; `plan` as in `routing/plan.py`.
    """
    program = tl.program_id(0)
    totals, before = _sum_counts(counts_ptr, program, num_blocks, NUM_EXPERTS, BINS, SUMMED)
    if program >= num_blocks:
        g = tl.arange(0, BLOCK_G)
        n_g = tl.where(g < NUM_EXPERTS, tl.gather(totals, tl.minimum(g, BINS - 1), 0), 0)
        first_g, end_g = groups_of_counts(n_g, num_positions, NUM_EXPERTS, BLOCK_G)
        write_plan(
            *(program - num_blocks, first_g, end_g, plan_ptr, num_positions),
            *(NUM_EXPERTS, BLOCKS, BLOCK_G, BLOCK_T, BLOCK_E),
        )
    else:
        next_row = tl.cumsum(totals, 0) - totals + before  # of every expert
        within = tl.arange(0, PART)
        first = program.to(tl.int64) * block
        length = tl.minimum(num_positions - first, block).to(tl.int32)
        for start in range(0, length, PART):
            position = start + within  # in the block
            experts = _load_experts(ids_ptr + first, position, length, NUM_EXPERTS)
            counts = tl.histogram(experts, BINS)
            ends = tl.cumsum(counts, 0)
            next_row -= ends - counts  # where the first of all sorted positions would be
            # Loaded during the sort; before the histogram, it would cost registers.
            probs = tl.load(probs_ptr + first + position, mask=position < length, other=0.0)
            keys = sort(experts * PART + within)  # by expert, then by position
            experts, place = keys // PART, keys % PART
            row = tl.gather(next_row, experts, 0) + within
            position = start + place
            mask = position < length
            tl.store(rows_ptr + first + position, row, mask=mask)
            tl.store(tokens_ptr + row.to(tl.int64), (first + position).to(tl.int32) // top_k, mask=mask)
            tl.store(row_probs_ptr + row.to(tl.int64), tl.gather(probs, place, 0), mask=mask)
            next_row += ends


@Launcher
def order_rows(builder: Builder, ids_TK: Array, probs_TK: Array, num_experts: int) -> RowOrder:
    """Contiguous ids of any integer dtype, and probabilities of any dtype; `T * K < 2**31`."""
    R = prod(ids_TK.shape)
    block = max(_PART, power_of_2(cdiv(R, _MOST_BLOCKS)))
    num_blocks, bins = max(1, cdiv(R, block)), power_of_2(num_experts + 2)
    blocks = row_blocks(builder.target.architecture)
    counts = builder.empty((num_blocks * (num_experts + 1),), torch.int32)
    plan = builder.empty((size_of_plan(R, num_experts, blocks),), torch.int32)
    row_ids, places = (builder.empty((R,), torch.int32) for _ in range(2))
    made = RowOrder(plan, row_ids, places, builder.empty((R,), probs_TK.dtype))
    common = {"ids_ptr": ids_TK, "counts_ptr": counts, "num_positions": R, "block": block, "BINS": bins}
    counted = common | {"NUM_EXPERTS": num_experts, "PART": _PART}
    builder.launch(_routing_counts_kernel, (num_blocks,), counted)
    arguments = common | {
        "probs_ptr": probs_TK,
        "plan_ptr": made.plan,
        "tokens_ptr": made.row_ids,
        "rows_ptr": made.places,
        "row_probs_ptr": made.probs,
        "num_blocks": num_blocks,
        "top_k": max(1, ids_TK.shape[-1]),
        "SUMMED": _SUMMED,
        "PART": _PART,
        **sizes_of_plan(num_experts, blocks),
    }
    grid = (num_blocks + num_plan_programs(R, num_experts, blocks),)
    costs = cost.order_rows(R, num_experts, ids_TK.dtype.itemsize, probs_TK.dtype.itemsize)
    builder.launch(_routing_places_kernel, grid, arguments, cost=costs, num_warps=8)
    return made
