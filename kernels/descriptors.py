"""Tensor descriptors (TMA on Hopper and later), made on the host from pointers and strides: nothing synchronises."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

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
