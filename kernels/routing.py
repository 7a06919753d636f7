"""The order of routed rows: from the experts that every token chose, `id[i]` of flat position `i = t * K + k`, to

    rows[i] = |{j : id[j] < id[i]}| + |{j < i : id[j] = id[i]}|,    slots = its inverse,
    offsets[e] = |{j : id[j] < e}|.

That is a stable sort by counting, in three launches: every block of positions counts its ids; the counts are summed
over the blocks before; every block places its positions. No atomics on memory: the same bits every run. Ids outside
`[0, E)` count as E, so rows of experts that are elsewhere come last, as padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import cost, launches

# Positions that one program counts and places, and those that it compares with each other at once.
_BLOCK, _CHUNK = 1024, 64


@triton.jit
def _load_experts(ids_ptr, position, num_positions, NUM_EXPERTS: tl.constexpr):
    """Experts of positions; E for ids that are none, E + 1 past the last position."""
    inside = position < num_positions
    ids = tl.load(ids_ptr + position, mask=inside, other=0).to(tl.int64)  # before any comparison: they may be of 8 bits
    experts = tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, NUM_EXPERTS)
    return tl.where(inside, experts, NUM_EXPERTS + 1).to(tl.int32)


@triton.jit(do_not_specialize=["num_positions"])
def _routing_counts_kernel(
    ids_ptr, counts_ptr, num_positions, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    experts = _load_experts(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_positions, NUM_EXPERTS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + block * (NUM_EXPERTS + 1) + bins, tl.histogram(experts, BINS), mask=bins <= NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_blocks"])
def _routing_sums_kernel(
    counts_ptr, totals_ptr, num_blocks, NUM_EXPERTS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Counts of a block become those of all blocks before it; totals are of all blocks."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before_E = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)
        at = counts_ptr + blocks.to(tl.int64)[:, None] * (NUM_EXPERTS + 1) + experts[None, :]
        mask = (blocks < num_blocks)[:, None] & (experts <= NUM_EXPERTS)[None, :]
        counts_BE = tl.load(at, mask=mask, other=0)
        tl.store(at, before_E[None, :] + tl.cumsum(counts_BE, 0) - counts_BE, mask=mask)
        before_E += tl.sum(counts_BE, 0)
    tl.store(totals_ptr + experts, before_E, mask=experts <= NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_positions"])
def _routing_places_kernel(
    ids_ptr,
    before_ptr,
    totals_ptr,
    offsets_ptr,
    slots_ptr,
    rows_ptr,
    num_positions,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins <= NUM_EXPERTS, other=0)
    next_row = tl.cumsum(totals, 0) - totals  # of every expert
    if block == 0:
        tl.store(offsets_ptr + bins, next_row, mask=bins <= NUM_EXPERTS)
    next_row += tl.load(before_ptr + block * (NUM_EXPERTS + 1) + bins, mask=bins <= NUM_EXPERTS, other=0)
    within = tl.arange(0, CHUNK)
    for start in range(0, tl.minimum(num_positions - block * BLOCK, BLOCK).to(tl.int32), CHUNK):
        position = block * BLOCK + start + within
        experts = _load_experts(ids_ptr, position, num_positions, NUM_EXPERTS)
        earlier = (experts[:, None] == experts[None, :]) & (within[None, :] < within[:, None])
        row = tl.gather(next_row, experts, 0) + tl.sum(earlier.to(tl.int32), 1)
        mask = position < num_positions
        tl.store(rows_ptr + position, row, mask=mask)
        tl.store(slots_ptr + row.to(tl.int64), position.to(tl.int32), mask=mask)
        next_row += tl.histogram(experts, BINS)


def route(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`(offsets [E + 1], slots [R], rows [R])`, int32, of contiguous ids of any integer dtype; `T * K < 2**31`."""
    R, device = ids_TK.numel(), ids_TK.device
    num_blocks = max(1, triton.cdiv(R, _BLOCK))
    bins = triton.next_power_of_2(num_experts + 2)

    def indices(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts, totals = indices(num_blocks, num_experts + 1), indices(num_experts + 1)
    offsets, slots, rows = indices(num_experts + 1), indices(R), indices(R)
    _routing_counts_kernel[(num_blocks,)](ids_TK, counts, R, num_experts, bins, _BLOCK)
    block_e = 16
    _routing_sums_kernel[(triton.cdiv(num_experts + 1, block_e),)](counts, totals, num_blocks, num_experts, 64, block_e)
    _routing_places_kernel[(num_blocks,)](
        ids_TK, counts, totals, offsets, slots, rows, R, num_experts, bins, _BLOCK, _CHUNK
    )
    launches.report("pointer", lambda: cost.route(R, num_experts, ids_TK.element_size()))
    return offsets, slots, rows
