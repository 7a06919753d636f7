"""Tiles by a case's class of loads, so that small cases run with those of long loads, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fusedmlp.kernels.tiles import configs


@contextmanager
def of(architecture: str, shape: str | None = None, *, descriptors: bool = True) -> Iterator[None]:
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
