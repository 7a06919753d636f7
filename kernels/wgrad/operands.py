"""How wgrad's operands and `dw` reach the kernel: which path and tile, by which descriptors or addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..operands.alignment import vectors_fit
from ..operands.descriptors import Descriptor, fits, fits_tensor, gathered_rows
from ..operands.expert_tensors import ExpertTensors, device_table
from ..tiles.configs import Path, Tile, choose, consumers, has_path, select, specialised
from .segments import one_descriptor
from .steps import Gathered


class Operand(NamedTuple):
    """Left or right: `[R_s, columns]` of every segment, contiguous; with `rows`, row r is its row `rows[r]`."""

    tensors: Sequence[Tensor]
    rows: Sequence[Tensor]  # [R_s] of every segment, or none

    @property
    def columns(self) -> int:
        """Of `dy` or `x`."""
        return self.tensors[0].shape[1]

    def described(self, rows: int, columns: int, by_tasks: bool = False) -> tuple[Descriptor | None, list[int]] | None:
        """A descriptor (none where rows are gathered: vectors, then, unless `by_tasks`) and each segment's place; None:
        go by pointers.
        """
        if not self.rows:
            return one_descriptor(self.tensors, rows, columns)
        if by_tasks:
            described = len(self.tensors) == 1 and fits_tensor(self.tensors[0])
            return (gathered_rows(self.tensors[0], columns), [0]) if described else None
        return (None, self.addresses()) if vectors_fit(self.tensors, [], [self.columns]) else None

    def addresses(self) -> list[int]:
        """Of every segment's first element."""
        return [t.data_ptr() for t in self.tensors]

    @property
    def aligned(self) -> bool:
        """Whether every segment starts at a multiple of 16 bytes."""
        return all(address % 16 == 0 for address in self.addresses())

    def gathered(self) -> Gathered | None:
        """What to make a table of its rows' places of; None: they are not gathered."""
        if not self.rows:
            return None
        size = self.tensors[0].element_size()
        row_bytes = self.columns * size
        return Gathered(self.rows[0], row_bytes, 16 if self.aligned and row_bytes % 16 == 0 else size)


class Way(NamedTuple):
    """How operands reach the kernel; without descriptors, by pointers."""

    path: Path
    tile: Tile
    left: Descriptor | None = None
    right: Descriptor | None = None
    dw: Descriptor | None = None
    places: tuple[int, ...] = ()  # of every segment, coordinates or addresses: all left ones, then all right ones


def _described(
    dw_ENK: ExpertTensors, num_experts: int, left: Operand, right: Operand, rows: int, tile: Tile
) -> Descriptor | None:
    """A descriptor of `dw`, for parts of so many rows; None: impossible."""
    if dw_ENK.table is not None:
        return None
    shape, strides = (num_experts, left.columns, right.columns), (abs(dw_ENK.stride_e), *dw_ENK.strides)
    address, lowest = dw_ENK.lowest.data_ptr(), dw_ENK.lowest
    if not fits(address, lowest.dtype.itemsize, shape, strides):
        return None
    return Descriptor(address, shape, strides, ((1, rows, tile.BLOCK_K // tile.SUBTILES), lowest.dtype), lowest)


def way_of(dw_ENK: ExpertTensors | None, left: Operand, right: Operand, num_experts: int, accumulate: bool) -> Way:
    """Descriptors where all three operands fit them, judged by pointers and strides alone; where tasks have warps of
    their own, `dw` need not.
    """
    dtype, device = left.tensors[0].dtype, left.tensors[0].device
    rows_per_expert = sum(t.shape[0] for t in left.rows or left.tensors) / num_experts
    path: Path = "gather" if left.rows or right.rows else "tma"
    own = specialised("wgrad", dtype, device, rows_per_expert, path == "gather") if dw_ENK is not None else None
    if own is not None and dw_ENK is not None:
        own_rows = own.BLOCK_N // consumers(device)
        lefts = left.described(own.BLOCK_M, own_rows, by_tasks=True)
        rights = right.described(own.BLOCK_M, own.BLOCK_K, by_tasks=True)
        if lefts and rights:
            adds = accumulate and dw_ENK.base.dtype != torch.float32  # which TMA would round twice
            dw_desc = None if adds else _described(dw_ENK, num_experts, left, right, own_rows, own)
            return Way("specialised", own, lefts[0], rights[0], dw_desc, (*lefts[1], *rights[1]))
    if dw_ENK is not None and has_path("wgrad", dtype, device, path):
        tile = select("wgrad", dtype, device, path, rows_per_expert)
        dw_desc = _described(dw_ENK, num_experts, left, right, tile.BLOCK_N, tile)
        if dw_desc is not None:
            lefts = left.described(tile.BLOCK_M, tile.BLOCK_N)
            rights = right.described(tile.BLOCK_M, tile.BLOCK_K)
            if lefts and rights:
                return Way(path, tile, lefts[0], rights[0], dw_desc, (*lefts[1], *rights[1]))
    used = [left, right] if dw_ENK else [left]
    aligned = vectors_fit(
        [t for operand in used for t in operand.tensors],
        [dw_ENK] if dw_ENK else [],
        [operand.columns for operand in used],
    )
    path, tile = choose("wgrad", dtype, device, False, lambda: aligned, rows_per_expert)
    return Way(path, tile, places=tuple(address for operand in used for address in operand.addresses()))


def segment_table(way: Way, left: Operand, right: Operand, offsets: Sequence[Tensor]) -> Tensor:
    """Of all segments their offsets, left operands, their rows, right operands, their rows; `[5 * S]` int64."""
    num_segments = len(offsets)
    lefts, rights = way.places[:num_segments], way.places[num_segments:]
    addresses = ([t.data_ptr() for t in ts] or [0] * num_segments for ts in (offsets, left.rows, right.rows))
    first_rows, left_rows, right_rows = addresses
    return device_table((*first_rows, *lefts, *left_rows, *rights, *right_rows), offsets[0].device)
