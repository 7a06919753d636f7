"""From rows per expert to tiles, on the device, so that no launch waits for a host value.

An M-ragged pass runs over tiles of BLOCK_M rows that never cross experts. Their number depends on the load, but is
at most `k - 1 + ceil((R - k + 1) / BLOCK_M)` for k non-empty groups. The host sizes the table and the grid by that;
how many there are is the table's first element, where programs stop. Rows that no expert owns (padding) form a last
group, `E`, for which kernels store zeros.

wgrad has equally many tiles for every expert, but a tile takes as long as its expert has rows. Programs take tiles from
one list, the longest first, each when it is free: the greedy rule, at most one short tile away from even shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _expert_offsets_kernel(
    counts_ptr, offsets_ptr, valid_ptr, num_rows, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr
):
    e = tl.arange(0, BLOCK_E)
    n = tl.load(counts_ptr + e, mask=e < NUM_EXPERTS, other=0).to(tl.int64)
    ends = tl.cumsum(tl.maximum(n, 0), 0)
    tl.store(valid_ptr, (tl.min(n, 0) >= 0) & (tl.max(ends, 0) <= num_rows))
    tl.store(offsets_ptr, 0)
    tl.store(offsets_ptr + 1 + e, tl.minimum(ends, num_rows).to(tl.int32), mask=e < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_schedule_kernel(
    offsets_ptr,
    tiles_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    g = tl.arange(0, BLOCK_G)  # groups: the experts, then the padding rows
    first_g = tl.load(offsets_ptr + g, mask=g <= NUM_EXPERTS, other=num_rows)
    end_g = tl.load(offsets_ptr + g + 1, mask=g < NUM_EXPERTS, other=num_rows)
    tile_ends = tl.cumsum((end_g - first_g + BLOCK_M - 1) // BLOCK_M, 0)
    used = tl.max(tile_ends, 0)
    if tl.program_id(0) == 0:
        tl.store(tiles_ptr, tl.max(tl.where(g < NUM_EXPERTS, tile_ends, 0), 0))
        tl.store(tiles_ptr + 1, used)

    # Binary search for the groups that end before tile t: [BLOCK_T, BLOCK_G] comparisons would not fit registers.
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.zeros((BLOCK_T,), dtype=tl.int32)
    half = BLOCK_G // 2
    while half > 0:
        group = tl.where(tl.gather(tile_ends, group + half - 1, 0) <= t, group + half, group)
        half = half // 2
    before = tl.where(group > 0, tl.gather(tile_ends, tl.maximum(group - 1, 0), 0), 0)

    mask = t < used
    first = tl.load(offsets_ptr + group, mask=mask, other=0) + (t - before) * BLOCK_M
    end = tl.load(offsets_ptr + group + 1, mask=mask & (group < NUM_EXPERTS), other=num_rows)
    tile_ptr = tiles_ptr + 3 * (1 + t)
    tl.store(tile_ptr, group, mask=mask)
    tl.store(tile_ptr + 1, first, mask=mask)
    tl.store(tile_ptr + 2, end, mask=mask)


@triton.jit
def tile_at(place, num_m, num_n, GROUP_M: tl.constexpr):
    """`(M-tile, N-tile)` at a place in the order of work; on a host, call `tile_at.fn`.

    GROUP_M M-tiles go through the N-tiles together, so that those of one expert find its weight tile in L2. All
    tiles cost the same (rows beyond a group's end are multiplied too), so no order balances better than another.
    """
    first_m = place // (GROUP_M * num_n) * GROUP_M
    size = min(num_m - first_m, GROUP_M)
    place = place % (GROUP_M * num_n)
    return first_m + place % size, place // size


@triton.jit
def load_tile(tiles_ptr, tile):
    """`(expert, first row, rows from there to the end of the expert)` of an M-tile."""
    tile_ptr = tiles_ptr + 3 * (1 + tile)
    first = tl.load(tile_ptr + 1)
    return tl.load(tile_ptr), first, tl.load(tile_ptr + 2) - first


@triton.jit
def zero_padding(y_ptr, tiles_ptr, num_columns, stride_y_r, stride_y_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros in the rows of `y` that no expert owns; all programs of a launch share the work."""
    owned, used = tl.load(tiles_ptr), tl.load(tiles_ptr + 1)
    for tile in range(owned + tl.program_id(0), used, tl.num_programs(0)):
        _, first, num_rows = load_tile(tiles_ptr, tile)
        row_M1 = tl.arange(0, BLOCK_M)[:, None]
        y_M1 = y_ptr + (first + row_M1).to(tl.int64) * stride_y_r
        for n in range(0, num_columns, BLOCK_N):
            column_1N = (n + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=y_ptr.dtype.element_ty)
            tl.store(y_M1 + column_1N * stride_y_n, zeros, mask=(row_M1 < num_rows) & (column_1N < num_columns))


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
    """`[1 + max_tiles, 3]` int32: how many tiles the experts have, and how many there are with those of padding rows;
    then, for each, its expert (E: padding), its first row and the end of the expert's rows. The rest is not written.
    """
    num_experts = offsets.shape[0] - 1
    num_tiles = max_tiles(num_rows, num_experts, block_m)
    tiles = torch.empty(1 + num_tiles, 3, dtype=torch.int32, device=offsets.device)
    block_t = 128
    _tile_schedule_kernel[(triton.cdiv(num_tiles, block_t),)](
        offsets, tiles, num_rows, num_experts, block_m, triton.next_power_of_2(num_experts + 1), block_t
    )
    return tiles


class Schedule:
    """Tiles of one load, built once for every BLOCK_M and shared by the passes of a call."""

    def __init__(self, offsets: Tensor, num_rows: int):
        self.offsets = offsets
        self.num_rows = num_rows
        self.num_experts = offsets.shape[0] - 1
        self._tiles: dict[int, Tensor] = {}

    @property
    def rows_per_expert(self) -> float:
        """The mean, from sizes that the host knows."""
        return self.num_rows / self.num_experts

    def tiles(self, block_m: int) -> Tensor:
        """See `tile_schedule`."""
        if block_m not in self._tiles:
            self._tiles[block_m] = tile_schedule(self.offsets, self.num_rows, block_m)
        return self._tiles[block_m]

    def max_tiles(self, block_m: int) -> int:
        """See `max_tiles`."""
        return max_tiles(self.num_rows, self.num_experts, block_m)

    def rows(self) -> list[int]:
        """Rows of every expert; reads them from the device."""
        rows: list[int] = self.offsets.diff().tolist()
        return rows


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
    block_e = 8
    _expert_order_kernel[(triton.cdiv(num_experts, block_e),)](
        offsets,
        segment_offsets,
        order,
        0 if segment_offsets is None else segment_offsets.shape[0],
        num_experts,
        block_e,
        triton.next_power_of_2(num_experts),
        num_warps=8,  # with fewer, Triton 3.9 keeps a reduction of 512 experts on the stack
    )
    return order
