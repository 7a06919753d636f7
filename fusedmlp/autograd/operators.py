"""Derivatives of the operators by themselves, registered with `torch.library`.

The layers of fusedmlp do not use these: their `autograd.Function`s run operators without recording them. Programs of
`torch.export`, which hold the operators alone, and direct calls of `torch.ops.fusedmlp` do. Weights then get plain
gradients, which PyTorch accumulates: only layers follow the gradient contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusedmlp.autograd.first_order import refuse_second_order
from fusedmlp.kernels.operands.quantized import is_quantized
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments, MLPGrads

_Grads = tuple[Any, ...]
_Formula = Callable[..., _Grads]


def _first_order_only(formula: _Formula) -> _Formula:
    """Run a formula `(ctx, saved tensors, *gradients)` without recording it."""

    def run(ctx: Any, *grads: Any) -> _Grads:
        saved = ctx.saved_tensors  # read once: a checkpoint does not recompute them twice
        with torch.no_grad():
            results = formula(ctx, saved, *grads)
        return refuse_second_order(results, (*grads, *saved), "through an operator of torch.ops.fusedmlp")

    return run


_TENSOR = object()  # placeholder of a saved tensor


def _save(ctx: Any, inputs: Sequence[Any], *outputs: Tensor) -> None:
    leaves, ctx.spec = tree_flatten(list(inputs))
    ctx.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *outputs)


def _inputs(ctx: Any, saved: Sequence[Any]) -> list[Any]:
    tensors = iter(saved)
    leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in ctx.leaves]
    inputs: list[Any] = tree_unflatten(leaves, ctx.spec)
    return inputs


def _wanted(flags: Any) -> bool:
    return any(flags) if isinstance(flags, (list, tuple)) else bool(flags)


def _outputs(group: Sequence[Tensor] | None, flags: Any) -> list[Tensor]:
    """Uninitialised outputs for the gradients of a weight or bias; empty if none is wanted."""
    return [torch.empty_like(t) for t in group] if group and _wanted(flags) else []


def _returned(outputs: list[Tensor], group: Sequence[Tensor] | None) -> list[Tensor | None] | None:
    """The gradients of a weight or bias, in the structure of the argument."""
    return None if group is None else [*outputs] or [None] * len(group)


def linear_backward(
    dy: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    offsets: Tensor,
    dw: list[Tensor],
    db: list[Tensor],
    need_dx: bool,
    accumulate: bool,
    recipe: str,
    impl: str,
) -> Tensor | None:
    """The backward of `ops.grouped_gemm`: write or add to `dw`, write `db`, return dx; an empty list is skipped. `w`:
    weights, or the copy by out features.
    """
    dx = None
    if need_dx:
        dx = ops.grouped_gemm(dy, w if is_quantized(w) else [t.mT for t in w], [], offsets, recipe, impl)
    if dw or db:
        ops.grouped_wgrad_(dw, db, [dy], [x], [offsets], [], [], accumulate, recipe, impl)
    return dx


def _refuse_copies(operands: list[Tensor]) -> None:
    if any(t.dtype is torch.float8_e4m3fn for t in operands):
        raise RuntimeError(
            "an operator of torch.ops.fusedmlp: expected x and weights, as a copy of them in 8 bits serves one "
            "direction; got float8_e4m3fn, whose output cannot be differentiated"
        )


@_first_order_only
def _grouped_gemm(ctx: Any, saved: Sequence[Any], dy: Tensor) -> _Grads:
    x, w, bias, offsets, recipe, impl = _inputs(ctx, saved)
    _refuse_copies(w)
    needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
    dy = dy.contiguous()
    dw, db = _outputs(w, needs_w), _outputs(bias, needs_bias)
    dx = linear_backward(dy, x.contiguous(), w, offsets, dw, db, needs_x, False, recipe, impl)
    return dx, _returned(dw, w), _returned(db, bias), None, None, None


@_first_order_only
def _grouped_mlp(ctx: Any, saved: Sequence[Any], dy: Tensor, _: Any) -> _Grads:
    *inputs, h = saved
    given, needs = MLPArguments(*_inputs(ctx, inputs)), MLPArguments(*ctx.needs_input_grad)
    x, row_ids = given.x, given.row_ids
    _refuse_copies([x, *given.fc1, *given.fc2])
    dw1, dw2 = _outputs(given.fc1, needs.fc1), _outputs(given.fc2, needs.fc2)
    db1, db2 = _outputs(given.bias1, needs.bias1), _outputs(given.bias2, needs.bias2)
    # dy is per row, so x has to be, too.
    rows = x if row_ids is None else x.index_select(0, row_ids)
    grads = MLPGrads(
        *ops.grouped_mlp_backward_(
            *MLPBackwardArguments.of(
                given,
                dw1=dw1,
                dw2=dw2,
                db1=db1,
                db2=db2,
                dy=dy.contiguous(),
                x=rows.contiguous(),
                h=h,
                bias2=given.bias2 or [],
                row_ids=None,
                places=None,
                accumulate1=False,
                accumulate2=False,
                need_dx=needs.x,
                keep=False,
            )
        )
    )
    dx = grads.dx if needs.x else None
    if dx is not None and row_ids is not None:  # a token's rows are added up in fp32
        dx = torch.zeros_like(x, dtype=torch.float32).index_add_(0, row_ids, dx.float()).to(x.dtype)
    returned: dict[str, Any] = dict.fromkeys(MLPArguments._fields) | {
        "x": dx,
        "fc1": _returned(dw1, given.fc1),
        "fc2": _returned(dw2, given.fc2),
        "bias1": _returned(db1, given.bias1),
        "bias2": _returned(db2, given.bias2),
        "probs": None if given.probs is None else grads.dprobs,
    }
    return tuple(returned.values())


def _combine(ctx: Any, dout: Tensor) -> _Grads:
    (places,) = ctx.saved_tensors
    each = dout.repeat_interleave(ctx.choices, 0)
    return dout.new_zeros(ctx.num_rows, dout.shape[1]).index_add(0, places, each), None, None, None


def _save_combine(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    y, places, num_tokens, _ = inputs
    ctx.save_for_backward(places)
    ctx.num_rows, ctx.choices = y.shape[0], places.numel() // max(num_tokens, 1)


def _order_rows(ctx: Any, _plan: Any, _row_ids: Any, _places: Any, drow_probs: Tensor) -> _Grads:
    (places,) = ctx.saved_tensors
    return None, drow_probs.index_select(0, places).view(ctx.shape), None, None


def _save_order_rows(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.save_for_backward(output[2])
    ctx.shape = inputs[1].shape


def _save_inputs(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    _save(ctx, inputs)


def _save_mlp(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    h = output[1]
    ctx.mark_non_differentiable(h)  # only backward uses it
    _save(ctx, inputs, h)


_DERIVATIVES: dict[str, tuple[_Formula, Callable[..., None]]] = {
    "grouped_gemm": (_grouped_gemm, _save_inputs),
    "grouped_mlp": (_grouped_mlp, _save_mlp),
    "combine": (_combine, _save_combine),
    "order_rows": (_order_rows, _save_order_rows),
}


def register() -> None:
    """Register the derivatives with PyTorch; the operators must be registered already."""
    for name, (formula, save) in _DERIVATIVES.items():
        torch.library.register_autograd(f"fusedmlp::{name}", formula, setup_context=save, lib=ops.library)
