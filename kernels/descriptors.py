"""Tensor descriptors (TMA on Hopper and later), made on the host from pointers and strides: nothing synchronises."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from .expert_tensors import ExpertTensors

_ALIGNMENT = 16  # bytes, of the base and of every stride but the last


def fits(address: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a descriptor can describe this tensor: unit last stride, the others positive and 16-byte aligned."""
    *outer, last = strides
    return (
        all(size > 0 for size in shape)
        and last == 1
        and address % _ALIGNMENT == 0
        and all(stride > 0 and stride * itemsize % _ALIGNMENT == 0 for stride in outer)
    )


def fits_tensor(tensor: Tensor) -> bool:
    """`fits` of a tensor as it is."""
    return fits(tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride())


def ragged_rows(t_RN: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Rows of groups, for `load_ragged` and `store_ragged`: zero-filled and masked at the end of a group."""
    return create_ragged_descriptor(t_RN, [block_rows, block_columns])


def matrices(w: ExpertTensors, num_experts: int, size: tuple[int, int]) -> Tensor | None:
    """All experts' `[N, K]` matrices (`size`) in one view of them as they lie: `[E, N, K]`, or `[E, K, N]` if N is
    contiguous, and from the last expert to the first if that is how they lie. None if no descriptor can describe it.
    """
    if w.table is not None:
        return None
    stride_n, stride_k = w.strides
    stride_e = w.stride_e if num_experts > 1 else _ALIGNMENT
    offset = w.base.storage_offset() + min(0, (num_experts - 1) * stride_e)
    itemsize = w.base.element_size()
    shape, strides = (num_experts, *size), (abs(stride_e), stride_n, stride_k)
    if stride_k != 1:
        shape, strides = (num_experts, size[1], size[0]), (abs(stride_e), stride_k, stride_n)
    start = int(w.base.data_ptr() + (offset - w.base.storage_offset()) * itemsize)
    return w.base.as_strided(shape, strides, offset) if fits(start, itemsize, shape, strides) else None


def of_matrices(w_ENK: Tensor, block_n: int, block_k: int, k_contiguous: bool) -> TensorDescriptor:
    """A view from `matrices`, one expert's tile at a time."""
    block = [1, block_n, block_k] if k_contiguous else [1, block_k, block_n]
    return TensorDescriptor(w_ENK, list(w_ENK.shape), list(w_ENK.stride()), block)
