"""Adapters of one GEMM, composed of grouped GEMMs: `y += B (A x)`, with `[scaling * A, B]` as operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedmlp.operators import ops
from fusedmlp.recipe import Formats

_UNROUNDED = Formats("", "bf16").encoded  # gradients of adapters are summed in float32


def forward_(y: Tensor, x: Tensor, adapter: Sequence[Tensor], offsets: Tensor, *options: Any) -> Tensor | None:
    """Add the adapter's product to y; return `scaling * A x`, for backward. `options`: batch_invariant, impl."""
    if not adapter:
        return None
    A, B = adapter
    t: Tensor = ops.grouped_gemm(x, [A], [], offsets, "", *options)
    y += ops.grouped_gemm(t, [B], [], offsets, "", *options)
    return t


def backward_(
    dx: Tensor | None,
    grads: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    t: Tensor,
    adapter: Sequence[Tensor],
    offsets: Tensor,
    *options: Any,
) -> None:
    """Add to dx, if it is wanted; write `grads` of the adapter, if there are any."""
    if not adapter:
        return
    A, B = adapter
    u = ops.grouped_gemm(dy, [B.mT], [], offsets, "", *options)
    if dx is not None:
        dx += ops.grouped_gemm(u, [A.mT], [], offsets, "", *options)
    for grad, left, right in zip(grads, (u, dy), (x, t), strict=False):
        ops.grouped_wgrad_([grad], [], [left], [right], [offsets], [], [], False, _UNROUNDED, options[-1])
