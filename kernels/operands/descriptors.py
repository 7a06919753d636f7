"""Tensor descriptors (TMA on Hopper and later), planned from strides and alignment: nothing synchronises."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..tiles.table import Tile
from .arrays import ALIGNMENT, Array, contiguous_strides
from .expert_tensors import ExpertTensors
from .quantized import CHUNK, Quantized

MAX_COORDINATE, MAX_ROWS = 0x7FFF0000, 2**30  # of `triton.tools.ragged_tma`


class Descriptor(NamedTuple):
    """Triton's `TensorDescriptor` of an array that `fits`, without the address."""

    array: Array  # starts where the described memory does
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Block and dtype, for which a kernel is compiled."""
        return self.block, self.array.dtype

    def described(self, base: Any, by_gluon: bool) -> Any:
        """The descriptor that Triton's own launches take, of memory from `base` on; for Gluon's kernels it also has the
        layout of a tile in shared memory.
        """
        described = base, list(self.shape), list(self.strides), list(self.block)
        if not by_gluon:
            return TensorDescriptor(*described)
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia import hopper

        size = self.array.dtype.itemsize
        are_scales = len(self.block) == 1 or self.array.dtype == torch.uint8
        swizzle = 0 if are_scales else min(self.block[-1] * size, 128)
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=len(self.block))
        return hopper.TensorDescriptor(*described, layout)


def fits(array: Array) -> bool:
    """Whether a descriptor can describe it: unit last stride, the others positive and 16-byte aligned."""
    *outer, last = array.strides
    if not (array.aligned and last == 1 and 0 not in array.shape):
        return False
    size = array.dtype.itemsize
    return all(stride > 0 and stride * size % ALIGNMENT == 0 for stride in outer)


def fits_halves(array_RG: Array, halves: int) -> bool:
    """Whether a row, or each of two halves of it (then a dimension of a descriptor), is whole multiples of 16 bytes."""
    return array_RG.shape[1] // halves * array_RG.dtype.itemsize % ALIGNMENT == 0


def check_fit(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if one of a kernel's arguments describes what no descriptor can."""
    for name, described in arguments.items():
        if isinstance(described, Descriptor) and not fits(described.array):
            array = described.array
            raise ValueError(f"{name}: expected rows, and an address that are multiples of 16 bytes; got {array}")


def ragged_rows(
    array_RN: Array, block_rows: int, block_columns: int, *, halves: int = 1, apart: bool = False
) -> Descriptor:
    """Describe rows in groups for `load_ragged` and `store_ragged`, which fill with zeros and mask at the end of a
    group, as `triton.tools.ragged_tma.create_ragged_descriptor` does.

    With two `halves` of a row, `[R, 2, N / 2]`, a tile has both or, if they are moved `apart`, one.
    """
    stride, columns = array_RN.strides[0], array_RN.shape[1] // halves
    distance, both = ((columns,), (2,)) if halves == 2 else ((), ())
    shape = (MAX_COORDINATE, MAX_COORDINATE, MAX_ROWS, *both, columns)
    strides = (2**34 - stride, stride, stride, *distance, 1)
    block = (1, 1, block_rows, *((1,) if apart and both else both), block_columns)
    return Descriptor(array_RN, shape, strides, block)


def scale_chunks(scales: Array, count: int = 1, halves: int = 1) -> Descriptor:
    """Describe scales of copies (`operands/quantized.py`), of which a tile is `count` chunks of 512 bytes: 128 fp32, or
    two lines of 256 bytes, the longest that TMA moves.

    With two `halves` of the rows of weights, scales of mxfp8, a tile has half of its chunks from each.
    """
    size = prod(scales.shape)
    shape: tuple[int, ...] = (size // 256, 256) if scales.dtype == torch.uint8 else (size,)
    block: tuple[int, ...] = (2 * count, 256) if scales.dtype == torch.uint8 else (128 * count,)
    if halves == 2:
        num_experts, steps, chunks = scales.shape[:3]
        shape, block = (num_experts * steps, 2, chunks, 256), (1, 2, count, 256)
    strides = contiguous_strides(shape)
    return Descriptor(scales.at(0, shape, strides), shape, strides, block)


def gathered_rows(array_RN: Array, block_columns: int) -> Descriptor:
    """Describe rows that Blackwell's TMA gathers by row ids, each by itself."""
    return Descriptor(array_RN, array_RN.shape, array_RN.strides, (1, block_columns))


def operand_rows(
    array_RN: Array, block_rows: int, block_columns: int, gathered: bool, by_tma: bool
) -> Descriptor | None:
    """Describe rows in groups, or gathered rows if TMA gathers them (`by_tma`); None: threads gather them."""
    if not gathered:
        return ragged_rows(array_RN, block_rows, block_columns)
    return gathered_rows(array_RN, block_columns) if by_tma else None


def matrices(w: ExpertTensors, size: tuple[int, int]) -> Array | None:
    """All experts' `[N, K]` matrices (`size`): `[E, N, K]`, or `[E, K, N]` if N is contiguous, and from the last expert
    to the first if that is how they lie. None if no descriptor can describe them.
    """
    if w.table is not None:
        return None
    stride_n, stride_k = w.strides
    stride_e = abs(w.stride_e) if w.num_experts > 1 else ALIGNMENT
    shape, strides = (w.num_experts, *size), (stride_e, stride_n, stride_k)
    if stride_k != 1:
        shape, strides = (w.num_experts, size[1], size[0]), (stride_e, stride_k, stride_n)
    described = w.lowest.at(0, shape, strides)
    return described if fits(described) else None


def of_matrices(w_ENK: Array, block_n: int, block_k: int, k_contiguous: bool, halves: int = 1) -> Descriptor:
    """Describe a view from `matrices`, for one expert's tile at a time; with two `halves` of `[E, N, K]`, for both, and
    of `[E, K, N]` for one at a time.
    """
    if halves == 1:
        block = (1, block_n, block_k) if k_contiguous else (1, block_k, block_n)
        return Descriptor(w_ENK, w_ENK.shape, w_ENK.strides, block)
    if not k_contiguous:
        (num_experts, K, N), (stride_e, stride_k, stride_n) = w_ENK.shape, w_ENK.strides
        halved, apart = (num_experts, 2, K, N // 2), (stride_e, N // 2 * stride_n, stride_k, stride_n)
        return Descriptor(w_ENK, halved, apart, (1, 1, block_k, block_n))
    (num_experts, N, K), (stride_e, stride_n, stride_k) = w_ENK.shape, w_ENK.strides
    halved, apart = (num_experts, 2, N // 2, K), (stride_e, N // 2 * stride_n, stride_n, stride_k)
    return Descriptor(w_ENK, halved, apart, (1, 2, block_n, block_k))


def eight_bit(x: Quantized, w: Quantized, rows: int, tile: Tile, halves: int = 1) -> dict[str, Any]:
    """Arguments of an M-ragged kernel for a row copy, of which a load has `rows`, and for weights."""
    by_pointer = w.scales.dtype == torch.float32
    return {
        "x_desc": ragged_rows(x.elements, rows, tile.BLOCK_K),
        "x_scales_desc": scale_chunks(x.scales),
        "w_desc": of_matrices(w.elements, tile.BLOCK_N // halves, tile.BLOCK_K, True, halves),
        "w_scales": w.scales if by_pointer else scale_chunks(w.scales, tile.BLOCK_N // CHUNK, halves),
        "num_experts": w.num_experts,
        "K_CONTIGUOUS": True,
        "REVERSED": False,
    }
