"""The project's launchers and public functions on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from cases import tiles
from ptx_emulator import driver

from fusedmlp import environment
from fusedmlp.kernels.tiles import select, table
from fusedmlp.targets import tiles_of

# Regimes of small experts, which those of the cases are, and those of large ones in their place.
SMALL = ("small", "memory_add", "memory_write")
SMALL_OF = {"mma_add": "memory_add", "mma_write": "memory_write"}


@contextmanager
def emulated(
    target: str,
    shape: str | None = None,
    *,
    descriptors: bool = True,
    warp_specialized: bool = False,
    large: bool = False,
    **options: Any,
) -> Iterator[list[driver.Launched]]:
    """`driver.gpu`, with launches planned for `target`, and with its tiles of the class of loads `shape`, if given.

    Without `descriptors`, only paths by pointers have tiles. `warp_specialized`: settings ask for those kernels, with
    tiles of `large` experts if they are asked for.
    """
    own = tiles_of(table.TABLES[target], shape, descriptors)
    if large:
        own = {key: tile for key, tile in own.items() if key.regime not in SMALL}
        own |= {key._replace(regime=SMALL_OF[key.regime]): tile for key, tile in own.items() if key.regime in SMALL_OF}
    planned_for = select.Target(target, driver.MULTIPROCESSORS, own, warp_specialized)
    with ExitStack() as stack:
        stack.enter_context(tiles.planned_for(planned_for))
        stack.enter_context(mock.patch.object(environment, "triton_interpret", return_value=True))
        yield stack.enter_context(driver.gpu(target, **options))
