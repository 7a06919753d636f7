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
    """Launches inside are planned for what `change` makes of the device's target."""
    of_device, once = select.target, cache(change)

    def target(device: torch.device, settings: Settings, dtype: torch.dtype) -> Target:
        return once(of_device(device, settings, dtype))

    with mock.patch.object(select, "target", target):
        yield


@contextmanager
def planned_for(target: Target) -> Iterator[None]:
    """Launches inside are planned for that target, whatever the device, but for TF32, which torch's setting allows."""
    with_tf32, without = replace(target, tf32=True), replace(target, tf32=False)

    def fixed(_device: torch.device, _settings: Settings, dtype: torch.dtype) -> Target:
        return with_tf32 if select.allows_tf32(dtype) else without

    with mock.patch.object(select, "target", fixed):
        yield


def of(shape: table.ShapeClass | None, settings: Settings, *, descriptors: bool = True) -> AbstractContextManager[None]:
    """Launches inside have the device's tiles for one class of loads, whatever the load is, with those settings.

    Without `descriptors`, only tiles that move by pointers.
    """
    return changed(lambda target: replace(target, tiles=tiles_of(target.tiles, shape, descriptors), settings=settings))
