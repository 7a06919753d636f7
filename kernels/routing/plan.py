"""What the launches of one call need to know of its load, made on the device by one launch, so that none waits.

A plan is one int32 tensor: the experts' first rows, `[E + 1]`; the order in which wgrad takes experts; then, for every
BLOCK_M that a launch may use, a table of tiles.

An M-ragged pass runs over tiles of BLOCK_M rows that never cross experts. Their number depends on the load, but is at
most `k - 1 + ceil((R - k + 1) / BLOCK_M)` for k non-empty groups. The host sizes tables and grids by that; how many
there are is a table's first element, where programs stop. Rows that no expert owns (padding) form a last group, `E`,
for which kernels store zeros.

Who only has first rows passes those, `[E + 1]`, in a plan's place, and `Schedule` makes the rest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching.launcher import launch
from ..tiles.configs import cdiv, power_of_2, row_blocks

# Places that one program of a table fills, and experts that one program puts in order.
_BLOCK_T, EXPERTS_PER_PROGRAM = 128, 8


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """The most tiles that any load can need; of a compiler's symbols, too."""
    groups: int = (min if isinstance(num_rows, int) else torch.sym_min)(num_experts + 1, num_rows)
    return groups - 1 + (num_rows - groups + block_m) // block_m  # without rows: 0


def size_of_table(num_rows: int, num_experts: int, block_m: int) -> int:
    """Elements: `[2]` tiles of experts, tiles with those of padding rows; unused; then `[max_tiles, 3]`."""
    return _whole(3 * (1 + max_tiles(num_rows, num_experts, block_m)))


def order_at(num_experts: int) -> int:
    """Where the order of experts starts; see `write_order`."""
    return _whole(num_experts + 1)


def tables_at(num_experts: int) -> int:
    """Where the first table of tiles starts."""
    return 2 * order_at(num_experts)


@lru_cache(maxsize=4096)
def size_of_plan(num_rows: int, num_experts: int, blocks: tuple[int, ...]) -> int:
    """Elements of a whole plan."""
    return tables_at(num_experts) + sum(size_of_table(num_rows, num_experts, block) for block in blocks)


@lru_cache(maxsize=4096)
def _tables(num_rows: int, num_experts: int, blocks: tuple[int, ...]) -> dict[int, int]:
    """Where the tables of a plan start, by BLOCK_M."""
    return {block: size_of_plan(num_rows, num_experts, blocks[:i]) for i, block in enumerate(blocks)}


@lru_cache(maxsize=4096)
def num_plan_programs(num_rows: int, num_experts: int, blocks: tuple[int, ...]) -> int:
    """How many programs `write_plan` takes."""
    tiles = (cdiv(max_tiles(num_rows, num_experts, block), _BLOCK_T) for block in blocks)
    programs: int = cdiv(num_experts, EXPERTS_PER_PROGRAM) + sum(tiles)
    return programs


def _whole(elements: int) -> int:
    """Up to the next 16 bytes."""
    return (elements + 3) // 4 * 4


@triton.jit
def _whole_table(tiles):
    return (3 * (1 + tiles) + 3) // 4 * 4


@triton.jit
def write_plan(
    part,
    first_g,
    end_g,
    plan_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program's part of a plan. `first_g`, `end_g`: rows of every group; of those after the experts, `num_rows`."""
    ORDER_AT: tl.constexpr = (NUM_EXPERTS + 4) // 4 * 4
    TABLES_AT: tl.constexpr = 2 * ORDER_AT
    ORDERS: tl.constexpr = (NUM_EXPERTS + BLOCK_E - 1) // BLOCK_E
    if part == 0:
        g = tl.arange(0, BLOCK_G)
        tl.store(plan_ptr + g, first_g, mask=g <= NUM_EXPERTS)
    if part < ORDERS:
        write_order(part, end_g - first_g, plan_ptr + ORDER_AT, NUM_EXPERTS, BLOCK_G, BLOCK_E)
    table_ptr = plan_ptr + TABLES_AT
    part -= ORDERS
    groups = tl.minimum(num_rows, NUM_EXPERTS + 1)
    for i in tl.static_range(len(BLOCKS)):
        most = groups - 1 + (num_rows - groups + BLOCKS[i]) // BLOCKS[i]
        programs = tl.cdiv(most, BLOCK_T)
        if (part >= 0) & (part < programs):
            write_tiles(part, first_g, end_g, table_ptr, NUM_EXPERTS, BLOCKS[i], BLOCK_G, BLOCK_T)
        table_ptr += _whole_table(most)
        part -= programs


@triton.jit
def write_order(
    part,
    rows_g,
    order_ptr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Experts by falling number of rows, `[E]`, then how many have any."""
    own, others = part * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_G)
    expert_g = others < NUM_EXPERTS
    rows_g = tl.where(expert_g, rows_g, 0)
    own_rows = tl.gather(rows_g, own, 0)
    before = (rows_g[None, :] > own_rows[:, None]) | (
        (rows_g[None, :] == own_rows[:, None]) & (others[None, :] < own[:, None])
    )
    rank = tl.sum((before & expert_g[None, :]).to(tl.int32), axis=1)
    used = tl.sum((rows_g > 0).to(tl.int32), axis=0)
    tl.store(order_ptr + rank, own, mask=own < NUM_EXPERTS)
    if part == 0:
        tl.store(order_ptr + NUM_EXPERTS, used)


@triton.jit
def write_tiles(
    part,
    first_g,
    end_g,
    tiles_ptr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """How many tiles the experts have, and how many there are with those of padding rows; an element that is not used;
    then for each its expert (E: padding), its first row and the end of the expert's rows. The rest is not written.
    """
    g = tl.arange(0, BLOCK_G)
    tile_ends = tl.cumsum((end_g - first_g + BLOCK_M - 1) // BLOCK_M, 0)
    used = tl.max(tile_ends, 0)
    if part == 0:
        tl.store(tiles_ptr, tl.max(tl.where(g < NUM_EXPERTS, tile_ends, 0), 0))
        tl.store(tiles_ptr + 1, used)
    # Binary search for the groups that end before tile t: [BLOCK_T, BLOCK_G] comparisons would not fit registers.
    t = part * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.zeros((BLOCK_T,), dtype=tl.int32)
    half = BLOCK_G // 2
    while half > 0:
        group = tl.where(tl.gather(tile_ends, group + half - 1, 0) <= t, group + half, group)
        half = half // 2
    before = tl.where(group > 0, tl.gather(tile_ends, tl.maximum(group - 1, 0), 0), 0)
    tile_ptr, mask = tiles_ptr + 3 * (1 + t), t < used
    tl.store(tile_ptr, group, mask=mask)
    tl.store(tile_ptr + 1, tl.gather(first_g, group, 0) + (t - before) * BLOCK_M, mask=mask)
    tl.store(tile_ptr + 2, tl.gather(end_g, group, 0), mask=mask)


@triton.jit
def groups_of_counts(n_g, num_rows, NUM_EXPERTS: tl.constexpr, BLOCK_G: tl.constexpr):
    """`(first rows, ends)` of all groups, in `[0, num_rows]` whatever the counts `n_g` (0 after the experts) are."""
    n_g = tl.maximum(n_g.to(tl.int64), 0)
    ends = tl.cumsum(n_g, 0)
    first_g = tl.minimum(ends - n_g, num_rows).to(tl.int32)
    end_g = tl.where(tl.arange(0, BLOCK_G) < NUM_EXPERTS, tl.minimum(ends, num_rows), num_rows).to(tl.int32)
    return tl.where(tl.arange(0, BLOCK_G) <= NUM_EXPERTS, first_g, end_g), end_g


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    counts_ptr,
    offsets_ptr,
    plan_ptr,
    valid_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """From counts, or from first rows."""
    g = tl.arange(0, BLOCK_G)
    if counts_ptr is not None:
        n_g = tl.load(counts_ptr + g, mask=g < NUM_EXPERTS, other=0).to(tl.int64)
        if tl.program_id(0) == 0:
            tl.store(valid_ptr, (tl.min(n_g, 0) >= 0) & (tl.sum(tl.maximum(n_g, 0), 0) <= num_rows))
        first_g, end_g = groups_of_counts(n_g, num_rows, NUM_EXPERTS, BLOCK_G)
    else:
        first_g = tl.load(offsets_ptr + g, mask=g <= NUM_EXPERTS, other=num_rows)
        end_g = tl.load(offsets_ptr + g + 1, mask=g < NUM_EXPERTS, other=num_rows)
    write_plan(tl.program_id(0), first_g, end_g, plan_ptr, num_rows, NUM_EXPERTS, BLOCKS, BLOCK_G, BLOCK_T, BLOCK_E)


@lru_cache
def sizes_of_plan(num_experts: int, blocks: tuple[int, ...]) -> dict[str, object]:
    """The constants of a kernel that calls `write_plan`."""
    group = power_of_2(max(EXPERTS_PER_PROGRAM, num_experts + 1))
    return {
        "NUM_EXPERTS": num_experts,
        "BLOCKS": blocks,
        "BLOCK_G": group,
        "BLOCK_T": _BLOCK_T,
        "BLOCK_E": EXPERTS_PER_PROGRAM,
    }


def _make(
    counts: Tensor | None, offsets: Tensor | None, valid: Tensor | None, num_rows: int, blocks: tuple[int, ...]
) -> Tensor:
    given = counts if counts is not None else offsets
    assert given is not None
    num_experts = given.shape[0] - (counts is None)
    plan = torch.empty(size_of_plan(num_rows, num_experts, blocks), dtype=torch.int32, device=given.device)
    programs = num_plan_programs(num_rows, num_experts, blocks)
    sizes = sizes_of_plan(num_experts, blocks)
    # With fewer warps, Triton 3.9 keeps a reduction of 512 experts on the stack.
    launch(_plan_kernel, (programs,), counts, offsets, plan, valid, num_rows, **sizes, num_warps=8)
    return plan


class CheckedPlan(NamedTuple):
    """A plan, and whether the counts that it is of were right: `[]`, bool."""

    plan: Tensor
    valid: Tensor


def plan_of_counts(counts_E: Tensor, num_rows: int) -> CheckedPlan:
    """Of `[E]` counts of any integer dtype.

    `valid` says whether no count is negative and the sum is at most `num_rows`. Whatever the counts, the rows stay
    in `[0, num_rows]` and do not decrease.
    """
    valid = torch.empty((), dtype=torch.bool, device=counts_E.device)
    return CheckedPlan(_make(counts_E, None, valid, num_rows, row_blocks(counts_E.device)), valid)


class Schedule:
    """A plan, as launchers read it."""

    def __init__(self, plan: Tensor, num_rows: int, num_experts: int | None = None):
        """`plan`: a plan, or first rows `[E + 1]`; without `num_experts` it is those."""
        self.num_rows = num_rows
        self.num_experts = plan.shape[0] - 1 if num_experts is None else num_experts
        self._tables = _tables(num_rows, self.num_experts, row_blocks(plan.device))
        self._plan = plan
        if plan.shape[0] == self.num_experts + 1:
            self._plan = _make(None, plan, None, num_rows, row_blocks(plan.device))
        self._views: dict[int, Tensor] = {}  # by where they start
        self._others: dict[int, Tensor] = {}  # by BLOCK_M

    @property
    def offsets(self) -> Tensor:
        """A tensor that starts with the first rows of the experts, then the end of the last: `[E + 1]`, int32."""
        return self._plan

    @property
    def order(self) -> Tensor:
        """See `write_order`."""
        return self._view(order_at(self.num_experts))

    @property
    def rows_per_expert(self) -> float:
        """The mean, from sizes that the host knows."""
        return self.num_rows / self.num_experts

    def tiles(self, block_m: int) -> Tensor:
        """See `write_tiles`."""
        at = self._tables.get(block_m)
        if at is not None:
            return self._view(at)
        if block_m not in self._others:  # tiles from elsewhere than the tables: a tuner's
            plan = _make(None, self._plan[: self.num_experts + 1], None, self.num_rows, (block_m,))
            self._others[block_m] = plan[tables_at(self.num_experts) :]
        return self._others[block_m]

    def _view(self, at: int) -> Tensor:
        view = self._views.get(at)
        if view is None:
            view = self._views[at] = self._plan[at:]
        return view

    def max_tiles(self, block_m: int) -> int:
        """See `max_tiles`."""
        return max_tiles(self.num_rows, self.num_experts, block_m)

    def rows(self) -> list[int]:
        """Rows of every expert; reads them from the device."""
        rows: list[int] = self._plan[: self.num_experts + 1].diff().tolist()
        return rows
