"""The backward of one grouped GEMM, and its adapter, composed of grouped GEMMs: `y += B (A x)`, with `[scaling * A, B]`
as operators take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedmlp import debug
from fusedmlp.operators import ops
from fusedmlp.recipe import Formats

_UNROUNDED = Formats("", "bf16").encoded  # gradients of adapters are summed in float32


def add_adapter_(y: Tensor, x: Tensor, adapter: Sequence[Tensor], offsets: Tensor, *options: Any) -> Tensor | None:
    """Add the adapter's product to y; return `scaling * A x`, for backward. `options`: batch_invariant, impl."""
    if not adapter:
        return None
    A, B = adapter
    t: Tensor = ops.grouped_gemm(x, [A], [], offsets, "", *options)
    y += ops.grouped_gemm(t, [B], [], offsets, "", *options)
    return t


def backward(
    dy: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    offsets: Tensor,
    dw: list[Tensor],
    db: list[Tensor],
    need_dx: bool,
    accumulate: bool,
    recipe: str,
    batch_invariant: bool,
    impl: str,
    dlora: list[Tensor],
    factors: list[Tensor],
    t: Tensor | None,
) -> Tensor | None:
    """The backward of `ops.grouped_gemm`: write or add to `dw`, write `db` and `dlora`, return dx; an empty list is
    skipped. `factors`, `t`: of an adapter, as forward took and made them.
    """
    report = None
    if debug.enabled and (w or dw):
        read = {
            "dy": debug.Rows(dy, offsets, w or dw),
            "x": debug.Rows(x, offsets, w or dw),
            "weight": w,
            "lora": factors,
        }
        report = debug.watch(dy, read | {"the earlier gradient of weight": dw if accumulate else None})
    dx = None
    if need_dx:
        dx = ops.grouped_gemm(dy, [t.mT for t in w], [], offsets, recipe, batch_invariant, impl)
    if dw or db:
        ops.grouped_wgrad_(dw, db, [dy], [x], [offsets], [], [], accumulate, recipe, impl)
    if t is not None:
        _adapter_backward_(dx, dlora, dy, x, t, factors, offsets, batch_invariant, impl)
    if report is not None:
        report("dgrad of grouped_linear", dx)
        report("wgrad of grouped_linear", [*dw, *db, *dlora])
    return dx


def _adapter_backward_(
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
    A, B = adapter
    u = ops.grouped_gemm(dy, [B.mT], [], offsets, "", *options)
    if dx is not None:
        dx += ops.grouped_gemm(u, [A.mT], [], offsets, "", *options)
    for grad, left, right in zip(grads, (u, dy), (x, t), strict=False):
        ops.grouped_wgrad_([grad], [], [left], [right], [offsets], [], [], False, _UNROUNDED, options[-1])
