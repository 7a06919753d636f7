"""The order and steps of several segments, or the order of one load that comes without a plan, made by one launch.

The order of experts, `[E + 1]`, is by falling number of rows, as in any plan. Several segments also need the
steps of every expert: its rows, BLOCK_R of one segment at a time, in the order of the segments. So the loop over an
expert's rows is one loop, whatever the number of segments, and its loads run ahead over the end of one segment into the
next. For a gathered operand it has the place of each row of each step: row ids that are looked up one after the other
would not be pipelined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device.tile_order import NOWHERE
from ..launching.program import Builder
from ..operands.arrays import Array
from ..routing.plan import EXPERTS_PER_PROGRAM, sizes_of_plan
from ..routing.plan_kernel import write_order
from ..tiles.rounding import cdiv

_BLOCK_T = 1024  # steps, or places, that are written at once


@triton.jit
def _write_places(
    places_ptr,
    row_ids_like_ptr,
    bases_ptr,
    s,
    num_segments,
    step,
    steps,
    first,
    end,
    width,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write the places of the rows of `steps` steps from `step` on: distances from segment 0 in units of UNIT bytes.

    `width`: units of a row. `bases` `[2, S]`: of the segments' operands, and of their row ids, with the dtype of
    `row_ids_like`.
    """
    distance = (tl.load(bases_ptr + s) - tl.load(bases_ptr)) // UNIT
    row_ids_ptr = tl.load(bases_ptr + num_segments + s).to(tl.pointer_type(row_ids_like_ptr.dtype.element_ty))
    places_ptr += step.to(tl.int64) * BLOCK_R
    for start in range(0, steps * BLOCK_R, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        used = first + at < end
        row = tl.load(row_ids_ptr + first + at, mask=used, other=0).to(tl.int64)
        tl.store(places_ptr + at, tl.where(used, distance + row * width, NOWHERE), mask=at < steps * BLOCK_R)


@triton.jit(do_not_specialize=["num_segments"])
def _wgrad_plan_kernel(
    offsets_ptr,
    segments_ptr,
    order_ptr,
    steps_ptr,
    left_places_ptr,
    left_row_ids_ptr,
    right_places_ptr,
    right_row_ids_ptr,
    num_segments,
    left_width,
    right_width,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LEFT_UNIT: tl.constexpr,
    RIGHT_UNIT: tl.constexpr,
):
    """Reads `offsets` `[E + 1]` int32, or `segments` `[5, S]` int64 (see `plan_steps`) and the row ids there; writes
    order, steps and places (see `WgradPlan`). `left_row_ids` and `right_row_ids` only give a dtype.
    """
    program = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    mask = g < NUM_EXPERTS
    rows_g, steps_g = tl.zeros((BLOCK_G,), tl.int32), tl.zeros((BLOCK_G,), tl.int32)
    for s in range(0, 1 if segments_ptr is None else num_segments):
        offsets = offsets_ptr
        if segments_ptr is not None:
            offsets = tl.load(segments_ptr + s).to(tl.pointer_type(tl.int32))
        size_g = tl.load(offsets + g + 1, mask=mask, other=0) - tl.load(offsets + g, mask=mask, other=0)
        rows_g += size_g
        steps_g += tl.cdiv(size_g, BLOCK_R)
    if program * BLOCK_E < NUM_EXPERTS:
        write_order(program, rows_g, order_ptr, NUM_EXPERTS, BLOCK_G, BLOCK_E)
    if segments_ptr is not None:
        # An expert without rows has one step without rows: its gradient may have to be overwritten with zeros.
        step = tl.sum(tl.where(g < program, tl.maximum(steps_g, 1), 0), 0)
        empty = tl.sum(tl.where(g == program, rows_g, 0), 0) == 0
        tl.store(steps_ptr + program, step)
        for s in range(0, num_segments):
            offsets = tl.load(segments_ptr + s).to(tl.pointer_type(tl.int32))
            first, end = tl.load(offsets + program), tl.load(offsets + program + 1)
            steps = tl.cdiv(end - first, BLOCK_R) + (empty & (s == 0)).to(tl.int32)
            for start in range(0, steps, BLOCK_T):
                t = start + tl.arange(0, BLOCK_T)
                row, step_ptr = first + t * BLOCK_R, steps_ptr + NUM_EXPERTS + 1 + 3 * (step + t)
                tl.store(step_ptr, tl.zeros_like(t) + s, mask=t < steps)
                tl.store(step_ptr + 1, row, mask=t < steps)
                tl.store(step_ptr + 2, end - row, mask=t < steps)
            if left_places_ptr is not None:
                _write_places(
                    *(left_places_ptr, left_row_ids_ptr, segments_ptr + num_segments, s, num_segments),
                    *(step, steps, first, end, left_width, LEFT_UNIT, BLOCK_R, BLOCK_T),
                )
            if right_places_ptr is not None:
                _write_places(
                    *(right_places_ptr, right_row_ids_ptr, segments_ptr + 3 * num_segments, s, num_segments),
                    *(step, steps, first, end, right_width, RIGHT_UNIT, BLOCK_R, BLOCK_T),
                )
            step += steps
        tl.store(steps_ptr + program + 1, step)  # the next program stores the same


class Gathered(NamedTuple):
    """An operand whose rows are gathered."""

    row_ids_like: Array  # row ids of one segment, for their dtype
    row_bytes: int
    unit: int  # bytes; divides a row and the distances between segments


class WgradPlan(NamedTuple):
    """Order and steps of wgrad. `steps` is int32: `[E + 1]` first steps of experts, then `[steps, 3]`."""

    order: Any  # [E + 1] int32: experts by falling number of rows, then how many have rows
    steps: Any  # for each step its segment, first row, and rows from there on; or None
    left_places: Any  # [steps, BLOCK_R] int64, in units from segment 0; or None
    right_places: Any


def plan_steps(
    builder: Builder,
    offsets: Array,
    num_experts: int,
    segments: Array | None = None,
    num_segments: int = 1,
    num_rows: int = 0,
    block_r: int = 1,
    left: Gathered | None = None,
    right: Gathered | None = None,
) -> WgradPlan:
    """Plan the launch that makes the order of one load (first rows `[E + 1]` or a plan), or steps of several segments.

    `segments`, `[5, S]` int64: addresses of the offsets `[E + 1]`; bases of left operands, addresses of their row ids;
    bases of right operands, addresses of their row ids. `num_rows`: upper bound for all segments together.
    """
    order = builder.empty((num_experts + 1,), torch.int32)
    steps = left_places = right_places = None
    if segments is not None:
        most = num_rows // block_r + (num_segments + 1) * num_experts
        steps = builder.empty((num_experts + 1 + 3 * most,), torch.int32)
        left_places = builder.empty((most * block_r,), torch.int64) if left else None
        right_places = builder.empty((most * block_r,), torch.int64) if right else None
    arguments = {
        "offsets_ptr": offsets,
        "segments_ptr": segments,
        "order_ptr": order,
        "steps_ptr": steps,
        "left_places_ptr": left_places,
        "left_row_ids_ptr": left and left.row_ids_like,
        "right_places_ptr": right_places,
        "right_row_ids_ptr": right and right.row_ids_like,
        "num_segments": num_segments,
        "left_width": left.row_bytes // left.unit if left else 0,
        "right_width": right.row_bytes // right.unit if right else 0,
        "NUM_EXPERTS": num_experts,
        "BLOCK_G": sizes_of_plan(num_experts, ())["BLOCK_G"],
        "BLOCK_E": EXPERTS_PER_PROGRAM,
        "BLOCK_R": block_r,
        "BLOCK_T": _BLOCK_T,
        "LEFT_UNIT": left.unit if left else 1,
        "RIGHT_UNIT": right.unit if right else 1,
    }
    programs = cdiv(num_experts, EXPERTS_PER_PROGRAM) if segments is None else num_experts
    builder.launch(_wgrad_plan_kernel, (programs,), arguments, num_warps=8)
    return WgradPlan(order, steps, left_places, right_places)
