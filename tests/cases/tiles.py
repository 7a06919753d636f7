"""Launches planned for other tiles, settings or GPUs than the device's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from unittest import mock

import torch

from fusedmlp.kernels.tiles import select, table
from fusedmlp.kernels.tiles.select import Target
from fusedmlp.targets import tiles_of


@contextmanager
def changed(change: Callable[[Target], Target]) -> Iterator[None]:
    """Plan launches in this context for `change(target)`, of the device's target."""
    of_device, cached_change = select.target, cache(change)

    def target(device: torch.device, warp_specialized: bool | None, dtype: torch.dtype) -> Target:
        return cached_change(of_device(device, warp_specialized, dtype))

    with mock.patch.object(select, "target", target):
        yield


@contextmanager
def planned_for(target: Target) -> Iterator[None]:
    """Plan launches in this context for that target, whatever the device; only TF32 follows torch's setting."""
    with_tf32, without = replace(target, tf32=True), replace(target, tf32=False)

    def fixed(_device: torch.device, _warp_specialized: bool | None, dtype: torch.dtype) -> Target:
        return with_tf32 if select.allows_tf32(dtype) else without

    with mock.patch.object(select, "target", fixed):
        yield


def of(
    shape: table.ShapeClass | None, warp_specialized: bool | None, *, descriptors: bool = True
) -> AbstractContextManager[None]:
    """Plan launches inside with that setting, and the device's tiles for one class of loads, whatever the load.

    Without `descriptors`, only paths by pointers have tiles.
    """

    def change(target: Target) -> Target:
        return replace(target, tiles=tiles_of(target.tiles, shape, descriptors), warp_specialized=warp_specialized)

    return changed(change)
