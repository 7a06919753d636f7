"""Plans: facts about a load that the launches of one call need, made on the device by one launch, so that none waits.

A plan is one int32 tensor: the experts' first rows, `[E + 1]`; the order in which wgrad takes experts; then, for every
BLOCK_M that a launch may use, a table of tiles.

An M-ragged pass runs over tiles of BLOCK_M rows that never cross experts. Their number depends on the load, but is at
most `k - 1 + ceil((R - k + 1) / BLOCK_M)` for k non-empty groups. The host sizes tables and grids by this
bound. A table's first element is the real number, where programs stop. Rows that no expert owns (padding) form a last
group, `E`, for which kernels store zeros.

`Schedule` also accepts bare first rows, `[E + 1]`, and has the rest made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launching.arguments import AroundTensor
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands.arrays import Array
from ..tiles.rounding import cdiv, power_of_2
from ..tiles.select import architecture
from ..tiles.table import row_blocks
from .plan_kernel import _plan_kernel

# Tiles of a table that one program writes, and experts that one program puts in order.
_BLOCK_T, EXPERTS_PER_PROGRAM = 128, 8


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Upper bound on the number of tiles; also for SymInts."""
    groups: int = (min if isinstance(num_rows, int) else torch.sym_min)(num_experts + 1, num_rows)
    return groups - 1 + (num_rows - groups + block_m) // block_m  # without rows: 0


def size_of_table(num_rows: int, num_experts: int, block_m: int) -> int:
    """Elements of a table: three (number of experts' tiles, of all with padding, unused), then `[max_tiles, 3]`."""
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


def size_on(device: torch.device, num_rows: int, num_experts: int) -> int:
    """Elements of a plan that a device makes; also for SymInts, so the result is not cached."""
    size: int = size_of_plan.__wrapped__(num_rows, num_experts, row_blocks(architecture(device)))
    return size


@lru_cache(maxsize=4096)
def num_plan_programs(num_rows: int, num_experts: int, blocks: tuple[int, ...]) -> int:
    """Number of programs that `write_plan` needs."""
    tiles = (cdiv(max_tiles(num_rows, num_experts, block), _BLOCK_T) for block in blocks)
    programs: int = cdiv(num_experts, EXPERTS_PER_PROGRAM) + sum(tiles)
    return programs


def _whole(elements: int) -> int:
    """Round up to whole 16 bytes."""
    return (elements + 3) // 4 * 4


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


def plan_tables(
    builder: Builder,
    counts: Array | None,
    offsets: Array | None,
    valid: Array | None,
    num_rows: int,
    num_experts: int,
    blocks: tuple[int, ...],
) -> Array:
    """Plan the launch that makes a plan, of counts or of first rows."""
    made = builder.empty((size_of_plan(num_rows, num_experts, blocks),), torch.int32)
    arguments: dict[str, Any] = {"counts_ptr": counts, "offsets_ptr": offsets, "plan_ptr": made, "valid_ptr": valid}
    arguments |= {"num_rows": num_rows, **sizes_of_plan(num_experts, blocks)}
    # With fewer warps, Triton 3.9 keeps a reduction of 512 experts on the stack.
    builder.launch(_plan_kernel, (num_plan_programs(num_rows, num_experts, blocks),), arguments, num_warps=8)
    return made


class CheckedPlan(NamedTuple):
    """A plan, and whether its counts were valid: `[]`, bool."""

    plan: Any
    valid: Any


@Launcher
def plan_of_counts(builder: Builder, counts_E: Array, num_rows: int) -> CheckedPlan:
    """Make the plan of `[E]` counts of any integer dtype.

    `valid` says whether no count is negative and the sum is at most `num_rows`. Whatever the counts, the rows stay
    in `[0, num_rows]` and do not decrease.
    """
    valid, blocks = builder.empty((), torch.bool), row_blocks(builder.target.architecture)
    return CheckedPlan(plan_tables(builder, counts_E, None, valid, num_rows, counts_E.shape[0], blocks), valid)


class Schedule(AroundTensor):
    """A plan, as launchers read it: a tensor or, while a program is planned, an array."""

    def __init__(self, plan: Any, num_rows: int, num_experts: int | None = None, any_load: bool = False):
        """`plan`: a plan, or first rows `[E + 1]`; without `num_experts`, it must be first rows. `any_load`: launches
        must not depend on the load.
        """
        self.num_rows, self.any_load = num_rows, any_load
        self.num_experts: int = plan.shape[0] - 1 if num_experts is None else num_experts
        self._plan = plan
        self._others: dict[int, Array] = {}  # plans of one BLOCK_M, by that
        if isinstance(plan, Tensor) and plan.shape[0] == self.num_experts + 1:
            self._plan = Launcher(self._tables_of)(plan)

    @staticmethod
    def planned(builder: Builder, plan: Array, num_rows: int, num_experts: int, any_load: bool = False) -> Schedule:
        """Schedule of a plan's array; where that is bare first rows, a launch makes the rest."""
        schedule = Schedule(plan, num_rows, num_experts, any_load)
        if plan.shape[0] == num_experts + 1:
            schedule._plan = schedule._tables_of(builder, plan)
        return schedule

    def _tables_of(self, builder: Builder, offsets: Array) -> Array:
        blocks = row_blocks(builder.target.architecture)
        return plan_tables(builder, None, offsets, None, self.num_rows, self.num_experts, blocks)

    def with_tensor(self, replaced: Callable[[Any], Any]) -> Schedule:
        """The same schedule, of `replaced(plan)`: a launcher plans with the array that describes the plan's tensor."""
        return Schedule(replaced(self._plan), self.num_rows, self.num_experts, self.any_load)

    @property
    def offsets(self) -> Any:
        """Tensor that starts with the experts' first rows, then the end of the last expert: `[E + 1]`, int32."""
        return self._plan

    @property
    def order(self) -> Any:
        """See `write_order`."""
        return self._plan[order_at(self.num_experts) :]

    @property
    def rows_per_expert(self) -> float:
        """The mean, from sizes that the host knows; for any load infinite, as tiles for long loads serve all."""
        return math.inf if self.any_load else self.num_rows / self.num_experts

    def tiles(self, builder: Builder, block_m: int) -> Array:
        """See `write_tiles`."""
        blocks = row_blocks(builder.target.architecture)
        plan: Array = self._plan
        if block_m not in blocks:  # 128, for 8-bit copies, where the interpreter has tiles of 16 rows alone
            blocks = (block_m,)
            if block_m not in self._others:
                tables = plan_tables(builder, None, plan, None, self.num_rows, self.num_experts, blocks)
                self._others[block_m] = tables
            plan = self._others[block_m]
        return plan[size_of_plan(self.num_rows, self.num_experts, blocks[: blocks.index(block_m)]) :]

    def max_tiles(self, block_m: int) -> int:
        """See `max_tiles`."""
        return max_tiles(self.num_rows, self.num_experts, block_m)
