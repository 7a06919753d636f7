"""From rows per expert to tiles, on the device, so that no launch waits for a host value.

An M-ragged pass runs over tiles of BLOCK_M rows that never cross experts. Their number depends on the load, but is
at most `k - 1 + ceil((R - k + 1) / BLOCK_M)` for k non-empty groups, and that many programs are launched. Rows that
no expert owns (padding) form a last group, `E`, for which kernels store zeros.

wgrad has equally many tiles for every expert, but a tile takes as long as its expert has rows. Programs take tiles from
one list, the longest first, each when it is free: the greedy rule, at most one short tile away from even shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _expert_offsets_kernel(
    counts_ptr, offsets_ptr, valid_ptr, num_rows, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr
):
    e = tl.arange(0, BLOCK_E)
    n = tl.load(counts_ptr + e, mask=e < NUM_EXPERTS, other=0).to(tl.int64)
    ends = tl.cumsum(tl.maximum(n, 0), 0)
    tl.store(valid_ptr, (tl.min(n, 0) >= 0) & (tl.max(ends, 0) <= num_rows))
    tl.store(offsets_ptr, 0)
    tl.store(offsets_ptr + 1 + e, tl.minimum(ends, num_rows).to(tl.int32), mask=e < NUM_EXPERTS)


@triton.jit
def _tile_schedule_kernel(
    offsets_ptr,
    tiles_ptr,
    num_rows,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    g = tl.arange(0, BLOCK_G)  # groups: the experts, then the padding rows
    first = tl.load(offsets_ptr + g, mask=g <= NUM_EXPERTS, other=num_rows)
    end = tl.load(offsets_ptr + g + 1, mask=g < NUM_EXPERTS, other=num_rows)
    tiles_g = (end - first + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles_g, 0)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.sum((tile_ends[None, :] <= t[:, None]).to(tl.int32), axis=1)  # groups wholly before tile t
    own = group[:, None] == g[None, :]
    start = tl.sum(tl.where(own, first[None, :] + (t[:, None] - (tile_ends - tiles_g)[None, :]) * BLOCK_M, 0), axis=1)
    stop = tl.sum(tl.where(own, end[None, :], 0), axis=1)
    mask = t < num_tiles
    tl.store(tiles_ptr + t, tl.where(group <= NUM_EXPERTS, group, -1), mask=mask)
    tl.store(tiles_ptr + num_tiles + t, start, mask=mask)
    tl.store(tiles_ptr + 2 * num_tiles + t, stop, mask=mask)


def expert_offsets(counts_E: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """`[E]` counts of any integer dtype -> `([E + 1] int32 first rows, [] bool)`.

    The flag says whether no count is negative and the sum is at most `num_rows`. Whatever the counts, the rows stay
    in `[0, num_rows]` and do not decrease.
    """
    num_experts = counts_E.shape[0]
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=counts_E.device)
    valid = torch.empty((), dtype=torch.bool, device=counts_E.device)
    block = triton.next_power_of_2(num_experts)
    _expert_offsets_kernel[(1,)](counts_E, offsets, valid, num_rows, num_experts, block)
    return offsets, valid


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """The most tiles that any load can need."""
    groups = min(num_experts + 1, num_rows)
    return groups - 1 + triton.cdiv(num_rows - groups + 1, block_m) if num_rows else 0


def tile_schedule(offsets: Tensor, num_rows: int, block_m: int) -> Tensor:
    """`[3, max_tiles]` int32: expert, first row and end row of the group, of every tile.

    Expert E: padding rows. Expert -1: no tile; there are as many as the load leaves over.
    """
    num_experts = offsets.shape[0] - 1
    num_tiles = max_tiles(num_rows, num_experts, block_m)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=offsets.device)
    block_t = 32
    _tile_schedule_kernel[(triton.cdiv(num_tiles, block_t),)](
        offsets, tiles, num_rows, num_tiles, num_experts, block_m, triton.next_power_of_2(num_experts + 1), block_t
    )
    return tiles


@triton.jit(do_not_specialize=["num_segments"])
def _expert_order_kernel(
    offsets_ptr,
    segment_offsets_ptr,
    order_ptr,
    num_segments,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
):
    own = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    others = tl.arange(0, BLOCK_ALL)
    own_rows = tl.zeros((BLOCK_E,), tl.int32)
    rows = tl.zeros((BLOCK_ALL,), tl.int32)
    for s in range(0, 1 if segment_offsets_ptr is None else num_segments):
        offsets = offsets_ptr
        if segment_offsets_ptr is not None:
            offsets = tl.load(segment_offsets_ptr + s).to(tl.pointer_type(tl.int32))
        own_rows += _rows_of(offsets, own, NUM_EXPERTS)
        rows += _rows_of(offsets, others, NUM_EXPERTS)
    before = (rows[None, :] > own_rows[:, None]) | (
        (rows[None, :] == own_rows[:, None]) & (others[None, :] < own[:, None])
    )
    rank = tl.sum((before & (others < NUM_EXPERTS)[None, :]).to(tl.int32), axis=1)
    tl.store(order_ptr + rank, own, mask=own < NUM_EXPERTS)
    tl.store(order_ptr + NUM_EXPERTS, tl.sum((rows > 0).to(tl.int32), axis=0))
    tl.store(order_ptr + NUM_EXPERTS + 1, 0)


@triton.jit
def _rows_of(offsets_ptr, experts, NUM_EXPERTS: tl.constexpr):
    mask = experts < NUM_EXPERTS
    first = tl.load(offsets_ptr + experts, mask=mask, other=0)
    return tl.load(offsets_ptr + experts + 1, mask=mask, other=0) - first


@triton.jit
def wgrad_tile(tile, num_n, num_k, GROUP_N):
    """`(rank of the expert, row tile, column tile)` of the tile at one place in wgrad's list.

    Tiles that run at the same time should share operands in L2, so an expert's tiles come in groups of GROUP_N rows
    by all columns, column by column. Plain arithmetic: `wgrad_tile.fn` runs on the host.
    """
    tiles_per_expert = num_n * num_k
    within = tile % tiles_per_expert
    group = within // (GROUP_N * num_k)
    rows = min(num_n - group * GROUP_N, GROUP_N)
    within = within % (GROUP_N * num_k)
    return tile // tiles_per_expert, group * GROUP_N + within % rows, within // rows


def expert_order(offsets: Tensor, segment_offsets: Tensor | None) -> Tensor:
    """`[E + 2]` int32: experts by falling number of rows, how many have any, and the next tile to take: 0.

    `segment_offsets` holds the addresses of several `offsets`, whose rows add up.
    """
    num_experts = offsets.shape[0] - 1
    order = torch.empty(num_experts + 2, dtype=torch.int32, device=offsets.device)
    block_e = 16
    _expert_order_kernel[(triton.cdiv(num_experts, block_e),)](
        offsets,
        segment_offsets,
        order,
        0 if segment_offsets is None else segment_offsets.shape[0],
        num_experts,
        block_e,
        triton.next_power_of_2(num_experts),
    )
    return order
