"""Tensors of all experts as kernels take them: one base pointer and a stride, or a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import pairwise
from math import prod
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arrays import ALIGNMENT, Array, kind_of


class ExpertTensors(NamedTuple):
    """Where experts' tensors lie, as `tiles.expert_base` and descriptors need it: tensors or, in a plan, arrays."""

    base: Any  # Tensor or Array: gives the dtype and, without a table, the address of expert 0
    table: Any  # [E] int64 addresses; None where experts are evenly spaced in one buffer
    stride_e: int
    strides: tuple[int, ...]  # 1 where the size is 1
    aligned: bool  # every expert starts at a multiple of 16 bytes
    num_experts: int

    @property
    def T(self) -> ExpertTensors:
        """The transposed matrices."""
        return self._replace(strides=self.strides[::-1])

    @property
    def lowest(self) -> Array:
        """In a plan and without a table: an array that starts at the lowest address of all experts."""
        base: Array = self.base
        below = min(0, (self.num_experts - 1) * self.stride_e)
        return base.at(below, base.shape, base.strides)

    @staticmethod
    def packed(first: Array, dim: int) -> ExpertTensors:
        """Describe one array: all experts' tensors (one more dimension than `dim`), or the only expert's."""
        size = first.dtype.itemsize
        is_packed = len(first.shape) > dim
        count = first.shape[0] if is_packed else 1
        stride_e = first.strides[0] if count > 1 else prod(first.shape)
        aligned = first.aligned and (not is_packed or stride_e * size % ALIGNMENT == 0)
        return ExpertTensors(first, None, stride_e, _strides(first.shape, first.strides)[-dim:], aligned, count)

    @staticmethod
    def of(group: Sequence[Tensor], dim: int) -> ExpertTensors:
        """Describe a packed tensor (one more dimension than `dim`) or a list of one tensor per expert.

        Experts in a list may lie anywhere, in one buffer in any order (Megatron's, reversed) or each on its own,
        but must agree in strides.
        """
        first = group[0]
        if len(group) == 1:
            return ExpertTensors.packed(Array(*kind_of(first), 0), dim)._replace(base=first)
        size, strides = first.element_size(), _strides(first.shape, first.stride())[-dim:]
        # Contiguous tensors of one shape, which callers have checked, are alike; to ask that takes half the time.
        alike = all(map(Tensor.is_contiguous, group)) or len(set(map(Tensor.stride, group))) == 1
        for e, tensor in enumerate(() if alike else group):
            its_strides = _strides(tensor.shape, tensor.stride())
            if its_strides != strides:
                raise ValueError(f"experts: expected the strides of expert 0, {strides}; expert {e} has {its_strides}")
        addresses = tuple(map(Tensor.data_ptr, group))
        step, lowest, highest, aligned = _places(addresses)
        # A stride only within one allocation: distances between allocations change from run to run, so kernels and bits
        # would, too, and a captured graph could need a kernel that its warm-up did not compile.
        buffer = first.untyped_storage()
        start = buffer.data_ptr()
        together = start <= lowest and highest < start + buffer.nbytes()
        if step is not None and together and step % size == 0:
            return ExpertTensors(first, None, step // size, strides, aligned, len(group))
        return ExpertTensors(first, address_table(addresses, first.device), 0, strides, aligned, len(group))


def arguments(name: str, experts: ExpertTensors | None) -> dict[str, Any]:
    """Kernel arguments for experts' tensors of that name, which may be absent."""
    base, table, stride_e = experts[:3] if experts else (None, None, 0)
    return {f"{name}_ptr": base, f"{name}_table_ptr": table, f"stride_{name}_e": stride_e}


def weight_arguments(w: ExpertTensors, rows: str, columns: str) -> dict[str, Any]:
    """Kernel arguments for weights `w`, with strides named after the letters of rows and columns."""
    strides = {f"stride_w_{rows}": w.strides[0], f"stride_w_{columns}": w.strides[1]}
    return {**arguments("w", w), **strides, "ALIGNED": w.aligned}


@lru_cache(maxsize=1024)
def _places(addresses: tuple[int, ...]) -> tuple[int | None, int, int, bool]:
    """The step between addresses (None: they are uneven), the lowest, the highest, and whether all are multiples of
    16.
    """
    step = addresses[1] - addresses[0]
    even = all(b - a == step for a, b in pairwise(addresses))
    return step if even else None, min(addresses), max(addresses), reduce(or_, addresses) % ALIGNMENT == 0


def _strides(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, without the arbitrary ones that PyTorch keeps for dimensions of size 1."""
    if 1 not in shape:
        return strides
    return tuple(stride if size != 1 else 1 for size, stride in zip(shape, strides, strict=True))


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses as an int64 tensor on the device, which is kept: parameters and their gradients come again.

    During the capture of a CUDA graph no new one is kept, as its memory belongs to the graph. They are kept by stream,
    as another stream might read before the copy is done.
    """
    if device.type == "cpu":
        return _kept_table(addresses, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return device_table(addresses, device)
    return _kept_table(addresses, device, torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=1024)
def _kept_table(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return device_table(addresses, device)


_read_by_graphs: list[Tensor] = []


def device_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses (or coordinates) as a new int64 tensor, copied without waiting."""
    if device.type == "cpu":
        return torch.tensor(addresses, dtype=torch.int64)
    pinned = _pinned(addresses)
    if torch.cuda.is_current_stream_capturing():
        _read_by_graphs.append(pinned)  # every replay copies from it again
    return pinned.to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def _pinned(addresses: tuple[int, ...]) -> Tensor:
    """The source of such copies, kept: to allocate pinned memory while a graph is captured may not be allowed."""
    return torch.tensor(addresses, dtype=torch.int64).pin_memory()
