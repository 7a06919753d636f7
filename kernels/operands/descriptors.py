"""Tensor descriptors (TMA on Hopper and later), made on the host from pointers and strides: nothing synchronises."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .expert_tensors import ExpertTensors

_ALIGNMENT = 16  # bytes, of the base and of every stride but the last
_MAX_COORDINATE, _MAX_ROWS = 0x7FFF0000, 2**30  # of `triton.tools.ragged_tma`


class Descriptor(NamedTuple):
    """What Triton's `TensorDescriptor` says, of a tensor that `fits`: without its checks, and before it has a base.

    The numbers say all, so that what is encoded from them holds for as long as they come again, whoever's memory it is.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: tuple[tuple[int, ...], torch.dtype]  # the block's shape, and the dtype: what a kernel is compiled for
    tensor: Tensor  # with the address, or `offset` elements from where its storage begins
    offset: int | None = None
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> Tensor:
        """The tensor itself, from its first element in memory."""
        if self.offset is None:
            return self.tensor
        return self.tensor.as_strided(self.shape, self.strides, self.offset)

    def checked(self, by_gluon: bool = False) -> Any:
        """As Triton's own launches take it; kernels of Gluon say how a tile lies in shared memory."""
        block, dtype = self.kind
        described = self.base, list(self.shape), list(self.strides), list(block)
        if not by_gluon:
            return TensorDescriptor(*described)
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia import hopper

        swizzle = min(block[-1] * dtype.itemsize, 128)
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=len(block))
        return hopper.TensorDescriptor(*described, layout)


def fits(address: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a descriptor can describe this tensor: unit last stride, the others positive and 16-byte aligned."""
    return address % _ALIGNMENT == 0 and _fit(itemsize, tuple(shape), tuple(strides))


@lru_cache(maxsize=4096)
def _fit(itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    *outer, last = strides
    return (
        all(size > 0 for size in shape)
        and last == 1
        and all(stride > 0 and stride * itemsize % _ALIGNMENT == 0 for stride in outer)
    )


def fits_tensor(tensor: Tensor) -> bool:
    """`fits` of a tensor as it is."""
    return tensor.data_ptr() % _ALIGNMENT == 0 and _fit(tensor.dtype.itemsize, tensor.shape, tensor.stride())


def fits_halves(t_RG: Tensor, halves: int) -> bool:
    """Whether a row, or each of two halves of it (then a dimension of a descriptor), is whole multiples of 16 bytes."""
    return t_RG.shape[1] // halves * t_RG.dtype.itemsize % _ALIGNMENT == 0


def ragged_rows(
    t_RN: Tensor, block_rows: int, block_columns: int, columns: int | None = None, halves: int = 1, apart: bool = False
) -> Descriptor:
    """Rows of groups, of which only the first `columns` are there, for `load_ragged` and `store_ragged`: zero-filled
    and masked at the end of a group. As `triton.tools.ragged_tma.create_ragged_descriptor` makes them; of two `halves`
    of a row, `[R, 2, N / 2]`, of which a tile has both or, if they come and go `apart`, one.
    """
    stride, columns = t_RN.stride(0), t_RN.shape[1] // halves if columns is None else columns
    distance, both = ((columns,), (2,)) if halves == 2 else ((), ())
    shape = (_MAX_COORDINATE, _MAX_COORDINATE, _MAX_ROWS, *both, columns)
    strides = (2**34 - stride, stride, stride, *distance, 1)
    block = (1, 1, block_rows, *((1,) if apart and both else both), block_columns)
    return Descriptor(t_RN.data_ptr(), shape, strides, (block, t_RN.dtype), t_RN)


def gathered_rows(t_RN: Tensor, block_columns: int) -> Descriptor:
    """Rows that an index names, which Blackwell's TMA brings each for itself."""
    return Descriptor(t_RN.data_ptr(), t_RN.shape, t_RN.stride(), ((1, block_columns), t_RN.dtype), t_RN)


class Matrices(NamedTuple):
    """All experts' matrices in one view of them as they lie."""

    address: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    tensor: Tensor
    offset: int


def matrices(w: ExpertTensors, num_experts: int, size: tuple[int, int]) -> Matrices | None:
    """All experts' `[N, K]` matrices (`size`): `[E, N, K]`, or `[E, K, N]` if N is contiguous, and from the last expert
    to the first if that is how they lie. None if no descriptor can describe them.
    """
    if w.table is not None:
        return None
    stride_n, stride_k = w.strides
    stride_e = w.stride_e if num_experts > 1 else _ALIGNMENT
    below = min(0, (num_experts - 1) * stride_e)  # of the first expert, in elements
    itemsize = w.base.dtype.itemsize
    shape, strides = (num_experts, *size), (abs(stride_e), stride_n, stride_k)
    if stride_k != 1:
        shape, strides = (num_experts, size[1], size[0]), (abs(stride_e), stride_k, stride_n)
    address = w.base.data_ptr() + below * itemsize
    if not fits(address, itemsize, shape, strides):
        return None
    return Matrices(address, shape, strides, w.base, int(w.base.storage_offset()) + below)


def of_matrices(w_ENK: Matrices, block_n: int, block_k: int, k_contiguous: bool, halves: int = 1) -> Descriptor:
    """A view from `matrices`, one expert's tile at a time; of two `halves` of `[E, N, K]`, as much of either."""
    address, shape, strides, tensor, offset = w_ENK
    if halves == 1:
        block = (1, block_n, block_k) if k_contiguous else (1, block_k, block_n)
        return Descriptor(address, shape, strides, (block, tensor.dtype), tensor, offset)
    (num_experts, N, K), (stride_e, stride_n, stride_k) = shape, strides
    halved, apart = (num_experts, 2, N // 2, K), (stride_e, N // 2 * stride_n, stride_n, stride_k)
    return Descriptor(address, halved, apart, ((1, 2, block_n, block_k), tensor.dtype), tensor, offset)
