"""Derivatives of the operators by themselves, for programs of `torch.export` and direct calls of `torch.ops.fusedmlp`.

A differentiable call runs the `autograd.Function` of the layer, with gradients that are returned: a program knows no
`main_grad`. The layers themselves run operators unrecorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedmlp.autograd import layers
from fusedmlp.autograd.call import Call
from fusedmlp.autograd.compiled import Traced
from fusedmlp.contract import engine
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPArguments, MLPOutput

_PLAIN = Traced({}, None)
_NO_COPIES = (
    "an operator of torch.ops.fusedmlp: expected x and weights, as a copy of them in 8 bits serves one direction; got "
    "float8_e4m3fn, whose output cannot be differentiated"
)


def _call(
    weights: Sequence[Sequence[Tensor] | None], impl: str, recipe: str, batch_invariant: bool, activation: str = ""
) -> Call:
    lengths = tuple(len(group or ()) for group in weights)
    own = impl, activation, recipe
    options: dict[str, Any] = {"batch_invariant": batch_invariant, "scalings": (1.0, 1.0), "traced": _PLAIN}
    return Call(lengths, False, "off", None, *own, **options)


def _grouped_gemm(
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    offsets: Tensor,
    recipe: str,
    batch_invariant: bool,
    impl: str,
) -> Any:
    tensors = (*w, *(bias or ()), x.contiguous(), offsets)
    return layers.GroupedLinear.apply(_call((w, bias, ()), impl, recipe, batch_invariant), *tensors)  # type: ignore[no-untyped-call]


class _MLP(layers.GroupedMLP):
    """As the layer's, but also returns the pre-activation."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Any:
        out = layers.GroupedMLP.run(ctx, call, *tensors)
        made = [tensor for tensor in out[1:] if tensor is not None]
        ctx.mark_non_differentiable(*made)
        return out.y, *(out.y.new_empty(0) if tensor is None else tensor for tensor in out[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
        return layers.GroupedMLP.backward(ctx, dy)


def _grouped_mlp(*args: Any) -> Any:
    given = MLPArguments(*args)
    x, groups = given.x, (given.fc1, given.fc2, given.bias1, given.bias2, given.lora1, given.lora2)
    rest: tuple[Tensor | None, ...] = given.probs, None, None, None
    if given.places is not None:  # the gradient of probs is by flat position
        probs = (
            (None, None) if given.probs is None else (given.probs.index_select(0, given.places), given.probs.detach())
        )
        rest = probs[0], given.row_ids, given.places, probs[1]
    elif given.row_ids is not None:  # dy is per row, so x has to be, too; a token's rows are added up in fp32
        x = x.float().index_select(0, given.row_ids).to(x.dtype)
    call = _call(groups, given.impl, given.recipe, given.batch_invariant, given.activation)
    tensors: list[Tensor | None] = [tensor for group in groups for tensor in group or ()]
    tensors += [x.contiguous(), given.offsets, *rest]
    return MLPOutput(*_MLP.apply(call, *tensors))  # type: ignore[no-untyped-call]


def _save_order_rows(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.save_for_backward(output[2])
    ctx.shape = inputs[1].shape


def _order_rows_backward(ctx: Any, _plan: Any, _row_ids: Any, _places: Any, drow_probs: Tensor) -> Any:
    (places,) = ctx.saved_tensors
    return None, drow_probs.index_select(0, places).view(ctx.shape), None, None


def _differentiable(operator: Any, derivative: Callable[..., Any], *args: Any) -> Any:
    """The Autograd kernel of an operator."""
    tensors = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(t, Tensor)]
    recorded = [t for t in tensors if t.requires_grad] if torch.is_grad_enabled() else []
    copies = any(t.dtype is torch.float8_e4m3fn for t in tensors)
    if recorded and not copies:
        return derivative(*args)
    with torch._C._AutoDispatchBelowAutograd():
        results = operator(*args)
    if not recorded:
        return results
    several = isinstance(results, tuple)
    marked = engine.fail_when_differentiated(_NO_COPIES, [*results] if several else [results], recorded)
    return tuple(marked) if several else marked[0]


def register() -> None:
    """Register the derivatives with PyTorch."""
    for name, derivative in (("grouped_gemm", _grouped_gemm), ("grouped_mlp", _grouped_mlp)):
        operator = getattr(torch.ops.fusedmlp, name).default
        ops.library.impl(name, partial(_differentiable, operator, derivative), "Autograd")
    order_rows: dict[str, Any] = {"setup_context": _save_order_rows, "lib": ops.library}
    torch.library.register_autograd("fusedmlp::order_rows", _order_rows_backward, **order_rows)
