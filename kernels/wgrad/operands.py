"""Choice of how wgrad's operands and `dw` reach the kernel: path and tile, descriptors or addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..launching.program import Builder
from ..operands.alignment import vectors_fit
from ..operands.arrays import ALIGNMENT, Array
from ..operands.descriptors import Descriptor, fits, gathered_rows
from ..operands.expert_tensors import ExpertTensors
from ..tiles.select import Chosen, Target, choices
from ..tiles.table import BY_DESCRIPTORS, Tile
from ..warp_specialized import gluon_missing
from .segments import one_descriptor
from .steps import Gathered


class Operand(NamedTuple):
    """Left or right operand: `[R_s, columns]` of every segment, contiguous; with ids, row r is its row `row_ids[r]`."""

    arrays: Sequence[Array]
    row_ids: Sequence[Array]  # [R_s] of every segment, or none

    @property
    def columns(self) -> int:
        """Width of `dy` or `x`."""
        return self.arrays[0].shape[1]

    @property
    def num_rows(self) -> int:
        """Rows of all segments together."""
        return sum(t.shape[0] for t in self.row_ids or self.arrays)

    def described(
        self, rows: int, columns: int, warp_specialized: bool = False
    ) -> tuple[Descriptor | None, Sequence[Array | int]] | None:
        """A descriptor and each segment's coordinate or array; None: impossible, all operands go by pointers.

        Gathered rows have no descriptor, but vector loads from each segment's array, unless the kernel is
        `warp_specialized`, which gathers them by TMA.
        """
        if not self.row_ids:
            return one_descriptor(self.arrays, rows, columns)
        if warp_specialized:
            described = len(self.arrays) == 1 and fits(self.arrays[0])
            return (gathered_rows(self.arrays[0], columns), [0]) if described else None
        return (None, self.arrays) if vectors_fit(self.arrays, [], [self.columns]) else None

    @property
    def aligned(self) -> bool:
        """Whether every segment starts at a multiple of 16 bytes."""
        return all(t.aligned for t in self.arrays)

    def gathered(self) -> Gathered | None:
        """Description for a table of its rows' places; None: they are not gathered."""
        if not self.row_ids:
            return None
        size = self.arrays[0].dtype.itemsize
        row_bytes = self.columns * size
        return Gathered(self.row_ids[0], row_bytes, ALIGNMENT if self.aligned and row_bytes % ALIGNMENT == 0 else size)


class OperandPlan(NamedTuple):
    """How operands reach the kernel; without descriptors, by pointers."""

    chosen: Chosen
    left: Descriptor | None = None
    right: Descriptor | None = None
    dw: Descriptor | None = None
    places: tuple[Array | int, ...] = ()  # coordinate or array of each segment: all left ones, then all right ones


def describe_dw(dw_ENK: ExpertTensors, size: tuple[int, int], rows: int, tile: Tile) -> Descriptor | None:
    """A descriptor of `dw`, matrices of this size, for subtiles of `rows` rows; None: impossible."""
    if dw_ENK.table is not None:
        return None
    shape, strides = (dw_ENK.num_experts, *size), (abs(dw_ENK.stride_e), *dw_ENK.strides)
    found = dw_ENK.lowest.at(0, shape, strides)
    return Descriptor(found, shape, strides, (1, rows, tile.BLOCK_K // tile.SUBTILES)) if fits(found) else None


def tma_rounds_twice(dw_ENK: ExpertTensors) -> bool:
    """True if TMA, which adds in the dtype of `dw`, would round a tile and then the sum."""
    return bool(dw_ENK.base.dtype != torch.float32)


def plan_operands(
    target: Target,
    dw_ENK: ExpertTensors | None,
    left: Operand,
    right: Operand,
    num_experts: int,
    accumulate: bool,
) -> OperandPlan:
    """The first of `choices` that operands and `dw` fit, judged by alignment and strides alone."""
    used = [left, right] if dw_ENK else [left]
    arrays = [array for operand in used for array in operand.arrays]
    vectors = vectors_fit(arrays, [dw_ENK] if dw_ENK else [], [operand.columns for operand in used])
    gathered = bool(left.row_ids or right.row_ids)
    for chosen in choices("wgrad", left.arrays[0].dtype, target, left.num_rows / num_experts, gathered):
        if chosen.path in BY_DESCRIPTORS:
            plan = dw_ENK and _by_descriptors(target, chosen, dw_ENK, left, right, accumulate)
            if plan:
                return plan
        elif vectors or chosen.path == "unaligned":
            break
    return OperandPlan(chosen, places=tuple(arrays))


def _by_descriptors(
    target: Target,
    chosen: Chosen,
    dw_ENK: ExpertTensors,
    left: Operand,
    right: Operand,
    accumulate: bool,
) -> OperandPlan | None:
    """None: they do not fit. Warp-specialized kernels also take a `dw` that no descriptor fits."""
    tile, warp_specialized = chosen.tile, chosen.path == "warp_specialized"
    if warp_specialized and gluon_missing():
        return None
    rows = tile.BLOCK_N // target.consumers if warp_specialized else tile.BLOCK_N
    lefts = left.described(tile.BLOCK_M, rows, warp_specialized)
    rights = right.described(tile.BLOCK_M, tile.BLOCK_K, warp_specialized)
    dw_desc = None
    if not (warp_specialized and accumulate and tma_rounds_twice(dw_ENK)):
        dw_desc = describe_dw(dw_ENK, (left.columns, right.columns), rows, tile)
    if not (lefts and rights and (dw_desc or warp_specialized)):
        return None
    return OperandPlan(chosen, lefts[0], rights[0], dw_desc, (*lefts[1], *rights[1]))


def segment_table(
    builder: Builder, plan: OperandPlan, left: Operand, right: Operand, offsets: Sequence[Array]
) -> Array:
    """Table of all segments' offsets, left operands, their row ids, right operands, their row ids; `[5 * S]` int64."""
    num_segments = len(offsets)
    lefts, rights = plan.places[:num_segments], plan.places[num_segments:]
    left_row_ids, right_row_ids = (list[Array | int](each.row_ids) or [0] * num_segments for each in (left, right))
    return builder.addresses((*offsets, *lefts, *left_row_ids, *rights, *right_row_ids))
