"""Arguments of a launch as the bytes of a kernel's parameters, and the memory that a launch may access."""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor

_FLOATS = {"fp32": "f", "f32": "f", "fp64": "d", "fp16": "e"}


def flat(kinds: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """`(type, value)` of each parameter: tuples taken apart, constants left out."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def packed(kind: str, value: Any, size: int) -> bytes:
    """One argument in little-endian order; `kind` is Triton's name of its type."""
    if kind == "nvTmaDesc":
        return bytes(value)
    if kind.startswith("*"):
        address = 0 if value is None else value if isinstance(value, int) else value.data_ptr()
        return int(address).to_bytes(8, "little")
    if kind in _FLOATS:
        return struct.pack("<" + _FLOATS[kind], value)
    if kind == "bf16":
        return struct.pack("<f", value)[2:]
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


_older: list[weakref.ref[Tensor]] | None = None  # tensors among the objects of the first call


def _tensors() -> list[Tensor]:
    """All tensors that are alive.

    The first call takes what is there out of the collector's lists, hundreds of thousands of objects, and remembers the
    tensors among them. Later calls look through the objects that are new, and through the tensors remembered.
    """
    global _older
    if _older is None:
        gc.collect()  # so that nothing that is dead counts as alive for ever
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    if _older is None:
        _older = [weakref.ref(tensor) for tensor in found]
        gc.freeze()
        return found
    return found + [tensor for ref in _older if (tensor := ref()) is not None]


def reachable() -> list[tuple[int, int]]:
    """Addresses of the memory of all CPU tensors that are alive: sorted spans that do not overlap."""
    spans = set()
    for tensor in _tensors():
        if not isinstance(tensor, FakeTensor):
            try:
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a tensor without memory
                continue
            if tensor.device.type == "cpu" and address and size:
                spans.add((address, address + size))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
