"""What every launch costs at least, for the roofline and for tests that count launches and traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the work that the equation needs, whatever the kernel does.

    `bytes` counts every operand once; `grad_bytes` is the part of it that reads and writes weight gradients. `path`
    is how tiles were moved.
    """

    kernel: str
    flops: int
    bytes: int
    grad_bytes: int = 0
    path: str = ""


_recorders: list[list[Launch]] = []


def report(path: str, cost: Callable[[], Launch]) -> None:
    """Called by every launcher; costs nothing unless somebody records. `cost` may read offsets from the device."""
    for recorder in _recorders:
        recorder.append(replace(cost(), path=path))


def is_recording() -> bool:
    """Whether somebody records."""
    return bool(_recorders)


def size_of(tensor: Tensor | None) -> int:
    """Bytes of one element, 0 without a tensor: as the functions in `launching/cost.py` take it."""
    return 0 if tensor is None else tensor.element_size()


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects every launch inside; waits for the device at each."""
    launches: list[Launch] = []
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.remove(launches)
