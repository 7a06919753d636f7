"""Timers, and the memory that a run allocates."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmlp.kernels.launching.cost import product_flops

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep what is freed. Otherwise large tensors are mapped and given back again and again, and which ones
    depends on what ran before: times then differ by up to twice, whatever the peer."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, 2**31 - 1)


class Stamp:
    """A moment on the GPU; the difference of two is in seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Stamp) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


def clock(device: str) -> Callable[[], Any]:
    """A timer for pytest-benchmark: the host's, or the GPU's own."""
    return time.perf_counter if device == "cpu" else Stamp


def flush_cache(device: str) -> None:
    """Fill a GPU's L2 cache with other data, and make the GPU wait so that launches queue up."""
    if device != "cpu":
        torch.empty(512 * 2**20, dtype=torch.int8, device=device).zero_()
        torch.cuda._sleep(8_000_000)


class Footprint(NamedTuple):
    """Memory and operators of one backward."""

    peak_bytes: int  # most that was allocated at once, beyond what was there before
    largest_bytes: int  # the largest single allocation
    ops: int  # PyTorch operators run, those inside others included


def footprint(run: Callable[[], None]) -> Footprint:
    """Count with PyTorch's profiler."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    live = peak = largest = ops = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak, largest = max(peak, live), max(largest, event.nbytes())
        elif "::" in event.name():
            ops += 1
    return Footprint(peak, largest, ops)


def saved_bytes(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> int:
    """Bytes that forward saves for backward, without its inputs: every storage once."""
    kept: dict[int, int] = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    assert y.grad_fn is not None
    return sum(kept.values())


def ceilings(device: str, tiny: bool) -> Iterator[tuple[str, float, float]]:
    """`(dtype, FLOP/s, bytes/s)`: a large dense product of each dtype, and a large copy, measured now."""
    n, size = (1024, 2**28) if device == "cpu" else (8192, 2**32)
    if tiny:
        n, size = 64, 2**16

    def seconds(run: Callable[[], object]) -> float:
        now, times = clock(device), []
        for _ in range(6):
            start = now()
            run()
            times.append(now() - start)
        return min(times)

    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / seconds(lambda: target.copy_(source))
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        yield str(dtype).removeprefix("torch."), product_flops(n, n, n) / seconds(lambda a=a, b=b: a @ b), bandwidth
