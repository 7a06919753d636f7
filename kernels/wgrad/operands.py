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
from ..tiles.select import Chosen, Target, choose, has_path, specialised, tile_for
from ..tiles.table import Path, Tile
from ..warp_specialized import gluon_missing
from .segments import one_descriptor
from .steps import Gathered


class Operand(NamedTuple):
    """Left or right operand: `[R_s, columns]` of every segment, contiguous; with `rows`, row r is its row `rows[r]`."""

    arrays: Sequence[Array]
    rows: Sequence[Array]  # [R_s] of every segment, or none

    @property
    def columns(self) -> int:
        """Width of `dy` or `x`."""
        return self.arrays[0].shape[1]

    @property
    def num_rows(self) -> int:
        """Rows of all segments together."""
        return sum(t.shape[0] for t in self.rows or self.arrays)

    def described(
        self, rows: int, columns: int, warp_specialized: bool = False
    ) -> tuple[Descriptor | None, Sequence[Array | int]] | None:
        """A descriptor and each segment's coordinate or array; None: impossible, all operands go by pointers.

        Gathered rows have no descriptor, but vector loads from each segment's array, unless the kernel is
        `warp_specialized`, which gathers them by TMA.
        """
        if not self.rows:
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
        if not self.rows:
            return None
        size = self.arrays[0].dtype.itemsize
        row_bytes = self.columns * size
        return Gathered(self.rows[0], row_bytes, ALIGNMENT if self.aligned and row_bytes % ALIGNMENT == 0 else size)


class OperandPlan(NamedTuple):
    """How operands reach the kernel; without descriptors, by pointers."""

    chosen: Chosen
    left: Descriptor | None = None
    right: Descriptor | None = None
    dw: Descriptor | None = None
    places: tuple[Array | int, ...] = ()  # coordinate or array of each segment: all left ones, then all right ones


def _described(
    dw_ENK: ExpertTensors, num_experts: int, left: Operand, right: Operand, rows: int, tile: Tile
) -> Descriptor | None:
    """A descriptor of `dw` for subtiles of `rows` rows; None: impossible."""
    if dw_ENK.table is not None:
        return None
    shape, strides = (num_experts, left.columns, right.columns), (abs(dw_ENK.stride_e), *dw_ENK.strides)
    found = dw_ENK.lowest.at(0, shape, strides)
    return Descriptor(found, shape, strides, (1, rows, tile.BLOCK_K // tile.SUBTILES)) if fits(found) else None


def plan_operands(
    target: Target,
    dw_ENK: ExpertTensors | None,
    left: Operand,
    right: Operand,
    num_experts: int,
    accumulate: bool,
) -> OperandPlan:
    """Choose descriptors where operands and `dw` fit them, judged by alignment and strides alone; in warp-specialized
    kernels `dw` need not fit.
    """
    dtype, rows_per_expert = left.arrays[0].dtype, left.num_rows / num_experts
    path: Path = "gather" if left.rows or right.rows else "tma"
    own = None
    if dw_ENK is not None and not gluon_missing():
        own = specialised("wgrad", dtype, target, rows_per_expert, path == "gather")
    if own is not None and dw_ENK is not None:
        own_rows = own.tile.BLOCK_N // target.consumers
        lefts = left.described(own.tile.BLOCK_M, own_rows, warp_specialized=True)
        rights = right.described(own.tile.BLOCK_M, own.tile.BLOCK_K, warp_specialized=True)
        if lefts and rights:
            adds = accumulate and dw_ENK.base.dtype != torch.float32  # which TMA would round twice
            dw_desc = None if adds else _described(dw_ENK, num_experts, left, right, own_rows, own.tile)
            return OperandPlan(own, lefts[0], rights[0], dw_desc, (*lefts[1], *rights[1]))
    if dw_ENK is not None and has_path("wgrad", dtype, target, path):
        chosen = tile_for("wgrad", dtype, target, path, rows_per_expert)
        tile = chosen.tile
        dw_desc = _described(dw_ENK, num_experts, left, right, tile.BLOCK_N, tile)
        if dw_desc is not None:
            lefts = left.described(tile.BLOCK_M, tile.BLOCK_N)
            rights = right.described(tile.BLOCK_M, tile.BLOCK_K)
            if lefts and rights:
                return OperandPlan(chosen, lefts[0], rights[0], dw_desc, (*lefts[1], *rights[1]))
    used = [left, right] if dw_ENK else [left]
    aligned = vectors_fit(
        [t for operand in used for t in operand.arrays],
        [dw_ENK] if dw_ENK else [],
        [operand.columns for operand in used],
    )
    chosen = choose("wgrad", dtype, target, False, aligned, rows_per_expert)
    return OperandPlan(chosen, places=tuple(array for operand in used for array in operand.arrays))


def segment_table(
    builder: Builder, plan: OperandPlan, left: Operand, right: Operand, offsets: Sequence[Array]
) -> Array:
    """Table of all segments' offsets, left operands, their row ids, right operands, their row ids; `[5 * S]` int64."""
    num_segments = len(offsets)
    lefts, rights = plan.places[:num_segments], plan.places[num_segments:]
    left_row_ids, right_row_ids = (list[Array | int](operand.rows) or [0] * num_segments for operand in (left, right))
    return builder.addresses((*offsets, *lefts, *left_row_ids, *rights, *right_row_ids))
