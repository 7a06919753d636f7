"""Tensors as plans see them: facts that decide how a kernel loads or stores one, without its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: of vectors that kernels load, and of the base of a descriptor

# Shape, strides, dtype, and the address modulo ALIGNMENT.
Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]


def kind_of(tensor: Tensor) -> Kind:
    """The kind of a tensor: equal kinds are planned for alike."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT


@dataclass(slots=True)
class Array:
    """One tensor of a program: an argument, an allocation, or a part of either."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    address: int  # modulo ALIGNMENT
    source: int  # number of the argument, or of the allocation, counted on after the arguments
    offset: int = 0  # bytes from where the source starts
    distance: int = 0  # bytes from the lowest tensor of a list of segments

    def at(self, elements: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
        """A part of the same memory that starts `elements` later, or earlier."""
        moved = elements * self.dtype.itemsize
        address, offset = (self.address + moved) % ALIGNMENT, self.offset + moved
        return Array(tuple(shape), tuple(strides), self.dtype, address, self.source, offset, self.distance)

    def __getitem__(self, key: int | slice) -> Array:
        """`array[i]`, or `array[start:]`."""
        (size, *shape), (stride, *strides) = self.shape, self.strides
        if isinstance(key, int):
            return self.at(key * stride, shape, strides)
        start = key.start or 0
        if start < 0 or key.stop is not None or key.step is not None:
            raise IndexError(f"expected array[i] or array[start:]; got {key}")
        return self.at(start * stride, (size - start, *shape), self.strides)

    @property
    def aligned(self) -> bool:
        """Whether it starts at a multiple of ALIGNMENT."""
        return self.address == 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def itemsize(array: Array | Tensor | None) -> int:
    """Bytes of one element, 0 without a tensor: as the functions in `launching/cost.py` take it."""
    return 0 if array is None else array.dtype.itemsize
