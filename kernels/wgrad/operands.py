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
from ..tiles.table import BY_DESCRIPTORS, Regime, Tile, regime_of_wgrad
from ..warp_specialized import refusal
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
        self, rows: int, columns: int, by_tma: bool = False
    ) -> tuple[Descriptor | None, Sequence[Array | int]] | None:
        """A descriptor and each segment's coordinate or array; None: impossible, all operands go by pointers.

        Gathered rows have no descriptor, but vector loads from each segment's array, unless TMA gathers (`by_tma`).
        """
        if not self.row_ids:
            return one_descriptor(self.arrays, rows, columns)
        if by_tma:
            return gathered_rows(self.arrays[0], columns), [0]
        return (None, self.arrays) if self.vectors_fit else None

    @property
    def vectors_fit(self) -> bool:
        """Whether rows of all segments can be loaded as vectors."""
        return vectors_fit(self.arrays, [], [self.columns])

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
    lowest = dw_ENK.lowest.at(0, shape, strides)
    return Descriptor(lowest, shape, strides, (1, rows, tile.BLOCK_K // tile.SUBTILES)) if fits(lowest) else None


def tma_rounds_twice(dw_ENK: ExpertTensors) -> bool:
    """True if TMA, which adds in the dtype of `dw`, would round a tile and then the sum."""
    return bool(dw_ENK.base.dtype != torch.float32)


def describe_ahead(dw_desc: Descriptor) -> Descriptor:
    """`dw` for subtiles that are loaded ahead: a multiple of 8 rows, in the order of `AheadEpilogue`."""
    (num_experts, N, K), (stride_e, stride_n, stride_k) = dw_desc.shape, dw_desc.strides
    shape, strides = (num_experts, N // 8, 4, 2, K), (stride_e, 8 * stride_n, stride_n, 4 * stride_n, stride_k)
    _, rows, columns = dw_desc.block
    return Descriptor(dw_desc.array, shape, strides, (1, rows // 8, 4, 2, columns))


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
    rows_per_expert = left.num_rows / num_experts
    regime: Regime = "any"
    if dw_ENK:
        size, itemsize = (left.columns, right.columns), left.arrays[0].dtype.itemsize
        regime = choose_regime(target, dw_ENK, size, rows_per_expert, itemsize, accumulate)
    refused = ""
    for chosen in choices("wgrad", left.arrays[0].dtype, target, rows_per_expert, gathered, regime):
        if chosen.path == "warp_specialized" and dw_ENK:
            refused = _refusal(target, left, right)
        if chosen.path in BY_DESCRIPTORS and not (refused and chosen.path == "warp_specialized"):
            plan = dw_ENK and _by_descriptors(target, chosen._replace(refused=refused), dw_ENK, left, right, accumulate)
            if plan:
                return plan
        elif chosen.path == "unaligned" or (vectors and chosen.path == "pointer"):
            break
    return OperandPlan(chosen._replace(refused=refused), places=tuple(arrays))


def _refusal(target: Target, left: Operand, right: Operand) -> str:
    """`refusal` of wgrad's operands."""
    gathered = [operand for operand in (left, right) if operand.row_ids]
    sorted_fit = all(one_descriptor(each.arrays, 8, 8) for each in (left, right) if not each.row_ids)
    tma_fits = target.consumers == 2 or all(fits(array) for each in gathered for array in each.arrays)
    vectors, segments = all(operand.vectors_fit for operand in gathered), len(left.arrays)
    described = sorted_fit and tma_fits
    return refusal(target, described=described, gathered=len(gathered), vectors=vectors, segments=segments)


def choose_regime(
    target: Target,
    dw_ENK: ExpertTensors,
    size: tuple[int, int],
    rows_per_expert: float,
    itemsize: int,
    accumulate: bool,
) -> Regime:
    """The regime for `dw`, matrices of this size, and operands with elements of `itemsize` bytes.

    TMA adds to a `dw` that cannot be loaded ahead.
    """
    N, K = size
    moved = (2 if accumulate else 1) * dw_ENK.base.dtype.itemsize * N * K + itemsize * rows_per_expert * (N + K)
    regime = regime_of_wgrad(2 * rows_per_expert * N * K, moved, accumulate, target.flops_a_byte)
    return "mma_add" if regime == "memory_add" and not _can_load_ahead(dw_ENK, size) else regime


def _can_load_ahead(dw_ENK: ExpertTensors, size: tuple[int, int]) -> bool:
    tile = Tile(64, 128, 256, 4, 2, 8)  # of any size: whether a descriptor fits depends on `dw` alone
    described = describe_dw(dw_ENK, size, tile.BLOCK_N, tile)
    return described is not None and not tma_rounds_twice(dw_ENK) and size[0] % 8 == 0


def _by_descriptors(
    target: Target,
    chosen: Chosen,
    dw_ENK: ExpertTensors,
    left: Operand,
    right: Operand,
    accumulate: bool,
) -> OperandPlan | None:
    """None: they do not fit. Warp-specialized kernels also take a `dw` that no descriptor fits."""
    warp_specialized, by_tma = chosen.path == "warp_specialized", target.gathers_by_tma(chosen.path)
    if warp_specialized and right.row_ids and not by_tma:  # the gathered operand is the narrow one: threads copy less
        N, K = chosen.tile.BLOCK_K, chosen.tile.BLOCK_N
        chosen = chosen._replace(tile=chosen.tile._replace(BLOCK_N=N, BLOCK_K=K))
    tile = chosen.tile
    rows = tile.BLOCK_N // target.consumers if warp_specialized else tile.BLOCK_N
    lefts = left.described(tile.BLOCK_M, rows, by_tma)
    rights = right.described(tile.BLOCK_M, tile.BLOCK_K, by_tma)
    dw_desc = None
    if not (warp_specialized and accumulate and tma_rounds_twice(dw_ENK)):
        dw_desc = describe_dw(dw_ENK, (left.columns, right.columns), rows, tile)
    if not (lefts and rights and (dw_desc or warp_specialized)):
        return None
    if tile.SLOTS and dw_desc:
        dw_desc = describe_ahead(dw_desc)
    return OperandPlan(chosen, lefts[0], rights[0], dw_desc, (*lefts[1], *rights[1]))


def segment_table(
    builder: Builder, plan: OperandPlan, left: Operand, right: Operand, offsets: Sequence[Array]
) -> Array:
    """Table of all segments' offsets, left operands, their row ids, right operands, their row ids; `[5 * S]` int64."""
    num_segments = len(offsets)
    lefts, rights = plan.places[:num_segments], plan.places[num_segments:]
    left_row_ids, right_row_ids = (list[Array | int](each.row_ids) or [0] * num_segments for each in (left, right))
    return builder.addresses((*offsets, *lefts, *left_row_ids, *rights, *right_row_ids))
