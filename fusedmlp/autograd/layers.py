"""The two `autograd.Function`s. They connect operators and the gradient contract, and compute nothing.

Tensors arrive as `apply(call, *weights, *biases, x, offsets, ...)`: weights come first, so that weight `i` is the
i-th tensor argument, and `ctx.next_functions[i]` is where its gradient flows. Backwards run unrecorded, as autograd
does not record writes into given tensors, and cannot be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from fusedmlp import debug, lora
from fusedmlp.autograd import linear
from fusedmlp.autograd.call import Call
from fusedmlp.contract import engine
from fusedmlp.contract.checks import fresh_like
from fusedmlp.contract.parameter_state import accumulation_lock
from fusedmlp.contract.route import Routes
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments, MLPGrads, MLPOutput
from fusedmlp.versions import outside_of_wrong_graphs

_Grads = tuple[Tensor | None, ...]


def _refuse_second_order(grads: _Grads, sources: Sequence[Tensor | None]) -> _Grads:
    """Under `create_graph=True`: give the gradients a graph that raises when they are differentiated by `sources`.

    `torch.autograd.function.once_differentiable` does not suffice: where the incoming gradient is a constant, as for
    `y.sum()`, it returns constants, and a gradient penalty would lose its own gradient without an error.
    """
    recorded = [tensor for tensor in sources if tensor is not None and tensor.requires_grad]
    wanted = [grad for grad in grads if grad is not None]
    if not (torch.is_grad_enabled() and recorded and wanted):
        return grads
    message = (
        "fusedmlp: expected first-order gradients alone; got double backward (create_graph=True, then differentiating "
        "the gradients), which is not supported"
    )
    marked = iter(engine.fail_when_differentiated(message, wanted, recorded))
    return tuple(None if grad is None else next(marked) for grad in grads)


def _first_order_only(
    backward: Callable[[Any, Sequence[Any], Tensor, Routes], _Grads],
) -> Callable[[Any, Tensor], _Grads]:
    """Run a layer's backward `(ctx, saved tensors, dy, routes)` unrecorded; abandon its `routes` if it fails."""

    @outside_of_wrong_graphs  # where a whole step is compiled, and this function reached as a frame of its own
    @wraps(backward)
    def run(ctx: Any, dy: Tensor) -> _Grads:
        if torch.compiler.is_compiling():  # a graph has no second order
            return backward(ctx, ctx.saved_tensors, dy, Routes(recorded=False))
        if engine.is_batched(dy):
            raise RuntimeError(
                "fusedmlp: a backward under vmap (autograd.grad(..., is_grads_batched=True), jacobian(vectorize=True)) "
                "is not supported; expected one backward for each gradient of y"
            )
        saved = ctx.saved_tensors  # before the lock: a checkpoint recomputes them, with collectives of its region
        routes = Routes(recorded=torch.is_grad_enabled())
        with accumulation_lock, torch.no_grad():
            try:
                grads = backward(ctx, saved, dy, routes)
            except BaseException:
                for abandoned in routes:
                    abandoned.destination.undo(abandoned)
                raise
            finally:
                for done in routes:
                    done.release()
        return _refuse_second_order(grads, (dy, *saved))

    return run


def _no_forward_mode(ctx: Any, *tangents: Any) -> NoReturn:
    raise RuntimeError(
        "fusedmlp under forward-mode AD (torch.autograd.forward_ad, torch.func.jvp): expected reverse mode"
        " (torch.autograd.grad), or plain PyTorch"
    )


class GroupedLinear(torch.autograd.Function):
    """`apply(call, *weight, *bias, *lora, x, offsets) -> y`; `lora`: none, or A and B of an adapter."""

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        """Run the GEMM; save its inputs."""
        weight, bias, adapter, (x, offsets) = call.split(tensors)
        ctx.call, ctx.local_weights = call, call.local(weight)
        options = call.batch_invariant, call.impl
        y: Tensor = ops.grouped_gemm(x, call.computed(weight, x), bias, offsets, call.recipe, *options)
        t = linear.add_adapter_(y, x, call.adapter(adapter, 0, x), offsets, *options)
        ctx.save_for_backward(*tensors, t)
        return y

    @staticmethod
    @_first_order_only
    def backward(ctx: Any, saved: Sequence[Any], dy: Tensor, routes: Routes) -> _Grads:
        """Gradients in the order of forward's arguments."""
        call: Call = ctx.call
        weight, bias, adapter, (x, offsets, t) = call.split(saved)
        weight_nodes, bias_nodes, adapter_nodes, (x_node, *_) = call.edges(ctx)
        dy = dy.contiguous()
        call.enter_backward(dy)
        route = call.route("weight", weight, weight_nodes, ctx, routes)
        db = _grads_like(bias, bias_nodes)
        need_dx, dw = x_node is not None, call.logical(route.outs)
        w = call.computed(weight, dy) if need_dx else []
        grads, factors = _grads_like(adapter, adapter_nodes, call.impl), call.adapter(adapter, 0, dy)
        options = call.recipe, call.batch_invariant, call.impl, grads, factors, t
        dx = linear.backward(dy, x, w, offsets, dw, db, need_dx, route.accumulate, *options)
        rest = _returned(db, bias) + lora.returned(grads, adapter, call.scalings[0])
        return (None, *call.finish(route, dy, x, offsets), *rest, dx, None)


class GroupedMLP(torch.autograd.Function):
    """`apply(call, *fc1, *fc2, *bias1, *bias2, *lora1, *lora2, x, offsets, probs, row_ids, places, row_probs,
    *copies) -> y`.

    With row_ids, places and row_probs (of `types.RowOrder`), x, y and probs are per token: `[T, H]`, `[T, H]` and
    `[T, K]`. If they are None, x, y and probs are per row. `copies`: none, or those of fc1 and then of fc2, each as
    in `QuantizedWeights`. (A 16-bit copy is given once: Dynamo refuses a tensor that is two arguments.)
    """

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Tensor:
        """Run both GEMMs; add up the rows of each token."""
        return GroupedMLP.run(ctx, call, *tensors).y

    @staticmethod
    def run(ctx: Any, call: Call, *tensors: Tensor | None) -> MLPOutput:
        """Run both GEMMs; save the inputs and the pre-activation."""
        fc1, fc2, bias1, bias2, lora1, lora2, rest = call.split(tensors)
        x, offsets, probs, row_ids, places, row_probs, *copies = rest
        forward1, _, forward2, _ = _by_pass(copies)
        rows, rows_scales, tokens, tokens_scales = x, None, x, None
        if call.saves_tokens:
            rows, rows_scales, tokens, tokens_scales = call.quantize_rows(x, offsets, fc1)
        out = MLPOutput(
            *ops.grouped_mlp(
                *MLPArguments(
                    x=rows,
                    x_scales=rows_scales,
                    fc1=call.computed(fc1, x, forward1),
                    fc2=call.computed(fc2, x, forward2),
                    bias1=bias1,
                    bias2=bias2,
                    offsets=offsets,
                    row_ids=row_ids,
                    places=places,
                    probs=probs if places is None else row_probs,
                    activation=call.activation,
                    recipe=call.recipe,
                    batch_invariant=call.batch_invariant,
                    lora1=call.adapter(lora1, 0, x),
                    lora2=call.adapter(lora2, 1, x),
                    impl=call.impl,
                )
            )
        )
        x_place, made = sum(call.lengths), (out.h, out.t1, out.t2, tokens_scales, call.source(x))
        ctx.save_for_backward(*tensors[:x_place], tokens, *tensors[x_place + 1 :], *made)
        ctx.call, ctx.local_weights = call, call.local(fc1) | call.local(fc2)
        return out

    @staticmethod
    @_first_order_only
    def backward(ctx: Any, saved: Sequence[Any], dy: Tensor, routes: Routes) -> _Grads:
        """Gradients in the order of forward's arguments."""
        call: Call = ctx.call
        fc1, fc2, bias1, bias2, lora1, lora2, rest = call.split(saved)
        x, offsets, probs, row_ids, places, row_probs, *copies, h, t1, t2, x_scales, _ = rest
        _, backward1, _, backward2 = _by_pass(copies)
        nodes1, nodes2, *other_nodes, (x_node, *_) = call.edges(ctx)
        dy = dy.contiguous()
        call.enter_backward(dy)
        # fc2 first, as its GEMM runs first: both weights could be one parameter.
        route2 = call.route("fc2_weight", fc2, nodes2, ctx, routes)
        route1 = call.route("fc1_weight", fc1, nodes1, ctx, routes)
        db1, db2 = map(_grads_like, (bias1, bias2), other_nodes[:2])
        dlora1, dlora2 = (_grads_like(*each, call.impl) for each in zip((lora1, lora2), other_nodes[2:], strict=True))
        need_dx = x_node is not None
        mlp_backward = debug.mlp_backward if debug.enabled else ops.grouped_mlp_backward_
        grads = MLPGrads(
            *mlp_backward(
                *MLPBackwardArguments(
                    dw1=call.logical(route1.outs),
                    dw2=call.logical(route2.outs),
                    db1=db1,
                    db2=db2,
                    dlora1=dlora1,
                    dlora2=dlora2,
                    dy=dy,
                    x=x,
                    x_scales=x_scales,
                    h=h,
                    fc1=call.computed(fc1, dy, backward1) if need_dx else call.logical(fc1),
                    fc2=call.computed(fc2, dy, backward2),
                    bias2=bias2,
                    offsets=offsets,
                    row_ids=row_ids,
                    places=places,
                    probs=probs if places is None else row_probs,
                    activation=call.activation,
                    accumulate1=route1.accumulate,
                    accumulate2=route2.accumulate,
                    need_dx=need_dx,
                    keep=route1.delayed or route2.delayed,
                    recipe=call.recipe,
                    batch_invariant=call.batch_invariant,
                    lora1=call.adapter(lora1, 0, dy),
                    lora2=call.adapter(lora2, 1, dy),
                    t1=t1,
                    t2=t2,
                    impl=call.impl,
                )
            )
        )
        dx, dprobs = (grads.dx if need_dx else None), None
        if probs is not None and grads.dprobs is not None:
            dprobs = grads.dprobs if places is None else grads.dprobs.view_as(probs)
        # fc2 leaves a queue before fc1.
        dfc2 = call.finish(route2, dy, grads.act_probs, offsets, dy_row_ids=row_ids)
        dfc1 = call.finish(route1, grads.dh, x, offsets, x_row_ids=row_ids)
        rest = _returned(db1, bias1) + _returned(db2, bias2)
        for outs, adapter, scaling in zip((dlora1, dlora2), (lora1, lora2), call.scalings, strict=False):
            rest += lora.returned(outs, adapter, scaling)
        return (None, *dfc1, *dfc2, *rest, dx, None, dprobs, None, None, None, *[None] * len(copies))


def _by_pass(copies: list[Any]) -> tuple[list[Any], ...]:
    """Copies of fc1 in forward and in backward, then of fc2: in 8 bits two tensors each, in 16 bits one for both."""
    if len(copies) == 8:
        return copies[:2], copies[2:4], copies[4:6], copies[6:]
    fc1, fc2 = copies[:1], copies[1:]
    return fc1, fc1, fc2, fc2


def _grads_like(tensors: list[Tensor], nodes: list[Any], impl_of_adapter: str = "") -> list[Tensor]:
    """Outputs for gradients of biases or of an adapter, which are always returned; empty if none is wanted."""
    if all(node is None for node in nodes):
        return []
    return lora.outs_like(tensors, impl_of_adapter) if impl_of_adapter else [fresh_like(tensor) for tensor in tensors]


def _returned(db: list[Tensor], bias: list[Tensor]) -> list[Tensor | None]:
    return [*db] if db else [None] * len(bias)
