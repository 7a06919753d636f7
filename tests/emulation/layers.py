"""The project's launchers and public functions on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ptx_emulator import driver

from fusedmlp import environment
from fusedmlp.kernels.tiles import configs


@contextmanager
def tiles(architecture: str, shape: str | None = None, *, descriptors: bool = True) -> Iterator[None]:
    """Launchers choose the tiles of an architecture for one class of loads, "short" or "long", whatever the load is.

    Without `descriptors`, only tiles that move by pointers.
    """
    rows = {
        key: {"short": tiles[shape], "long": tiles[shape]} if shape else tiles
        for key, tiles in configs.TABLES[architecture].items()
        if (descriptors or key[1] not in configs.BY_DESCRIPTORS) and shape in (None, *tiles)
    }
    with mock.patch.dict(configs.TABLES, {architecture: rows}):
        yield


@contextmanager
def emulated(
    target: str, shape: str | None = None, *, descriptors: bool = True, specialised: bool = False, **options: Any
) -> Iterator[list[driver.Launched]]:
    """`driver.gpu`, for which launchers choose `tiles` of `target`; `specialised`: with a task for each warp."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(configs, "SPECIALISED", specialised))
        stack.enter_context(tiles(target, shape, descriptors=descriptors))
        stack.enter_context(mock.patch.object(configs, "architecture", return_value=target))
        stack.enter_context(mock.patch.object(environment, "triton_interpret", return_value=True))
        launched = stack.enter_context(driver.gpu(target, **options))
        configs._multiprocessors.cache_clear()
        stack.callback(configs._multiprocessors.cache_clear)
        yield launched
