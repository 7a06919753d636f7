"""The project's launchers and public functions on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ptx_emulator import driver

from bench.cases import tiles
from fusedmlp import environment
from fusedmlp.kernels.tiles import configs


@contextmanager
def emulated(
    target: str, shape: str | None = None, *, descriptors: bool = True, specialised: bool = False, **options: Any
) -> Iterator[list[driver.Launched]]:
    """`driver.gpu`, for which launchers choose tiles of `target`; `specialised`: with a task for each warp."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(configs, "SPECIALISED", specialised))
        stack.enter_context(tiles.of(target, shape, descriptors=descriptors))
        stack.enter_context(mock.patch.object(configs, "architecture", return_value=target))
        stack.enter_context(mock.patch.object(environment, "triton_interpret", return_value=True))
        launched = stack.enter_context(driver.gpu(target, **options))
        configs._multiprocessors.cache_clear()
        stack.callback(configs._multiprocessors.cache_clear)
        yield launched
