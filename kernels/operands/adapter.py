"""A second product of an M-ragged pass, of few columns: with a low-rank adapter, `x @ w^T + t @ b^T`, `t = x @ a^T`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..tiles.table import BY_DESCRIPTORS, Path, Tile
from . import descriptors
from .arrays import Array
from .expert_tensors import ExpertTensors

# Arguments of a warp-specialized kernel without an adapter.
NONE: Mapping[str, None] = dict.fromkeys(("t_ptr", "t_desc", "b_desc", "rank"))


class Adapter(NamedTuple):
    """`t` `[R, r]`, contiguous, and `b` `[E, N, r]`, of all experts in one tensor that lies as the weights do."""

    t_Rr: Array
    b_ENr: ExpertTensors

    @property
    def rank(self) -> int:
        """`r`."""
        return self.t_Rr.shape[1]


def fits(adapter: Adapter | None, k_contiguous: bool) -> bool:
    """Whether descriptors can move it beside weights with that order of strides."""
    if adapter is None:
        return True
    return (
        descriptors.fits(adapter.t_Rr)
        and descriptors.matrices(adapter.b_ENr, adapter.b_ENr.base.shape[-2:]) is not None
        and (adapter.b_ENr.strides[1] == 1) == k_contiguous
    )


def arguments(
    adapter: Adapter | None,
    path: Path,
    tile: Tile,
    block_rows: int,
    block_columns: int,
    halves: int = 1,
    b_by_pointers: bool = False,
) -> dict[str, Any]:
    """Arguments of a plain kernel for a path; `block_rows`, `block_columns`: of t and b that one load brings.

    `b_by_pointers`: on path "tma", b is loaded by pointers.
    """
    if adapter is None:
        return {**NONE, "b_ptr": None, "stride_b_e": None, "stride_b_n": None, "stride_b_k": None}
    t, b = adapter
    t_desc = b_desc = None
    view = descriptors.matrices(b, b.base.shape[-2:])
    if path in BY_DESCRIPTORS and view is not None:
        t_desc = descriptors.ragged_rows(t, block_rows, tile.BLOCK_K)
        if path == "warp_specialized" or not b_by_pointers:
            b_desc = descriptors.of_matrices(view, block_columns, tile.BLOCK_K, b.strides[1] == 1, halves)
    strides = {"stride_b_e": b.stride_e, "stride_b_n": b.strides[0], "stride_b_k": b.strides[1]}
    return {"t_ptr": t, "t_desc": t_desc, "b_ptr": b.base, "b_desc": b_desc, **strides, "rank": adapter.rank}


def warp_specialized(arguments: dict[str, Any], copied: bool = False) -> dict[str, Any]:
    """The same for a warp-specialized kernel, which has t by a pointer if threads copy the rows of x, else by TMA."""
    taken = {name: value for name, value in arguments.items() if not name.startswith(("b_ptr", "stride_b_"))}
    return {**taken, "t_ptr" if not copied else "t_desc": None}
