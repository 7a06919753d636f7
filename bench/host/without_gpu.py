"""Runs code for a GPU without one: CPU tensors, and a CUDA driver that does nothing (`null_driver.py`)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import fusedmlp
from bench.host import null_driver
from bench.host.cost import as_on_a_gpu
from bench.limits import measure

LARGE = 2**20  # elements; larger tensors are left empty, and their memory is never touched
_PUBLIC = ("grouped_mlp", "moe_experts", "quantize_weights")
_NOTHING = ("synchronize", "_sleep", "empty_cache", "reset_peak_memory_stats")


@contextmanager
def without_gpu(target: str) -> Iterator[None]:
    """Compile and launch kernels inside for that GPU; nothing is executed, and every time is 1 ms."""
    normal_, zeros, empty = torch.Tensor.normal_, torch.zeros, torch.empty

    def fill(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return tensor if tensor.numel() > LARGE else normal_(tensor, *args, **options)

    def cleared(*size: Any, **options: Any) -> torch.Tensor:
        like = empty(*size, **{**options, "device": "meta"})
        return zeros(*size, **options) if like.numel() <= LARGE else _untouched(like)

    def once(run: Callable[[], object], *_: Any) -> float:
        run()
        return 1.0

    patches = (
        (null_driver, "CAPABILITY", divmod(int(target.removeprefix("sm_")), 10)),
        *((fusedmlp, name, partial(getattr(fusedmlp, name), impl="triton")) for name in _PUBLIC),
        *((torch.cuda, name, lambda *_: None) for name in _NOTHING),
        (torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 1.0)),
        (torch.Tensor, "normal_", fill),
        (torch, "zeros", cleared),
        (measure, "time_ms", once),
        (measure, "host_ms", once),
        (measure, "sustained", lambda run, *_: (once(run), None)),
        (measure, "ceilings", lambda: measure.Ceilings(1e12, 1e11)),
    )
    with ExitStack() as stack:
        for owner, name, other in patches:
            stack.enter_context(mock.patch.object(owner, name, other))
        stack.enter_context(as_on_a_gpu())
        yield


def _untouched(like: torch.Tensor) -> torch.Tensor:
    """Zeros, of which there may be more than the machine has memory for."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux, which mmap does not name
    return torch.frombuffer(mmap.mmap(-1, like.nbytes, flags), dtype=like.dtype).view(like.shape)
