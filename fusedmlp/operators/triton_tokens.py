"""Rows of tokens in the `triton` implementation: added up and, in backward, gathered by each kernel that reads them, or
sorted first.

dy, x and dx, `[R, H]` in the order of experts, are never needed together. So sorted rows lie where dx is written last,
and take no memory of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fusedmlp.kernels.launching import cost
from fusedmlp.kernels.launching.program import Builder
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.descriptors import fits
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.routing.combine import combine_
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.routing.spread import spread_
from fusedmlp.kernels.tiles.select import Target
from fusedmlp.kernels.tiles.table import FORMATS, SORT_FIRST, SortFirst, shape_class


class Sorted(NamedTuple):
    """Which rows are sorted first."""

    dy: bool
    x: bool


class Rows(NamedTuple):
    """Rows of experts as a pass reads them."""

    array: Array  # [R, H], or with ids [T, H]
    row_ids: Array | None

    @property
    def segment(self) -> list[Array]:
        """Row ids as wgrad takes them."""
        return [] if self.row_ids is None else [self.row_ids]


def choose(
    target: Target,
    given: Any,
    schedule: Schedule,
    fc2_EHF: ExpertTensors,
    dw1: ExpertTensors | None,
    dw2: ExpertTensors | None,
) -> Sorted:
    """Decide by FLOPs of the kernels that read the rows, and bytes of a copy; `given`: arguments of backward, as
    arrays. `dw1`, `dw2`: what it writes now, or None.

    Without dx there is no place for sorted rows. Adapters gather, and so do batch-invariant calls, whose bits may not
    depend on sizes.
    """
    read, num_rows = (given.dy, given.x), schedule.num_rows
    T, H = given.dy.shape
    rule = SORT_FIRST.get((target.architecture, FORMATS[given.h.dtype], shape_class(schedule.rows_per_expert)))
    tokens = given.row_ids is not None and given.places is not None and T and num_rows % T == 0
    gathers = given.batch_invariant or given.lora1 or given.lora2
    if rule is None or gathers or not tokens or not given.need_dx or not all(map(fits, read)):
        return Sorted(False, False)
    # Pointers to single experts' weights go with pointers to rows: gathering costs nothing there.
    dgrad_act = 0 if fc2_EHF.table else cost.product_flops(num_rows, fc2_EHF.base.shape[-1], H)
    dy = dgrad_act + _flops(dw2, given.accumulate2, schedule, rule)
    x = _flops(dw1, given.accumulate1, schedule, rule)
    least = rule.flops_a_byte * 2 * num_rows * H * given.dy.dtype.itemsize
    return Sorted(dy >= least, x >= least)


def _flops(dw: ExpertTensors | None, accumulate: bool, schedule: Schedule, rule: SortFirst) -> int:
    """FLOPs of wgrad; none where main_grad's memory is so much the limit that gathering costs nothing."""
    if dw is None:
        return 0
    N, K = dw.base.shape[-2:]
    moved = (2 if accumulate else 1) * dw.base.dtype.itemsize
    hidden = 2 * schedule.rows_per_expert < rule.grad_flops_a_byte * moved
    return 0 if hidden else cost.product_flops(N, K, schedule.num_rows)


def rows(builder: Builder, tokens: Array, given: Any, schedule: Schedule, sorted_RH: Array | None) -> Rows:
    """Rows of tokens: sorted into `sorted_RH`, if that is given. Those of no expert here are not written there."""
    if sorted_RH is None:
        return Rows(tokens, given.row_ids)
    spread_.plan(builder, sorted_RH, tokens, given.places, schedule)
    return Rows(sorted_RH, None)


def combined(builder: Builder, of_rows_RH: Any, places_R: Array | None, num_tokens: int) -> Any:
    """Sums of every token's rows, `[T, H]`; the rows where there are no places, None where there are no rows."""
    if of_rows_RH is None or places_R is None:
        return of_rows_RH
    out_TH = builder.empty((num_tokens, of_rows_RH.shape[1]), of_rows_RH.dtype, late=True)
    combine_.plan(builder, out_TH, of_rows_RH, places_R)
    return out_TH
