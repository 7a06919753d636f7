"""Launches planned for other tiles, settings or GPUs than the device's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from unittest import mock

import torch

from fusedmlp.doctor.targets import tiles_of
from fusedmlp.kernels.tiles import select, table
from fusedmlp.kernels.tiles.select import Settings, Target


@contextmanager
def changed(change: Callable[[Target], Target]) -> Iterator[None]:
    """Plan launches in this context for `change(target)`, of the device's target."""
    of_device, cached_change = select.target, cache(change)

    def target(device: torch.device, settings: Settings, dtype: torch.dtype) -> Target:
        return cached_change(of_device(device, settings, dtype))

    with mock.patch.object(select, "target", target):
        yield


@contextmanager
def planned_for(target: Target) -> Iterator[None]:
    """Plan launches in this context for that target, whatever the device; only TF32 follows torch's setting."""
    with_tf32, without = replace(target, tf32=True), replace(target, tf32=False)

    def fixed(_device: torch.device, _settings: Settings, dtype: torch.dtype) -> Target:
        return with_tf32 if select.allows_tf32(dtype) else without

    with mock.patch.object(select, "target", fixed):
        yield


def of(shape: table.ShapeClass | None, settings: Settings, *, descriptors: bool = True) -> AbstractContextManager[None]:
    """Plan launches inside with those settings, and the device's tiles for one class of loads, whatever the load.

    Without `descriptors`, only paths by pointers have tiles.
    """
    return changed(lambda target: replace(target, tiles=tiles_of(target.tiles, shape, descriptors), settings=settings))
