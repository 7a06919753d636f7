"""The two `autograd.Function`s. They connect operators and the gradient contract, and compute nothing.

Tensors arrive as `apply(call, *weights, *biases, x, offsets, ...)`: weights come first, so that weight `i` is the
i-th tensor argument, and `ctx.next_functions[i]` is where its gradient flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from fusedmlp.autograd import operators, weight_copies
from fusedmlp.autograd.first_order import first_order_only
from fusedmlp.contract.checks import fresh_like
from fusedmlp.contract.destinations.choice import Mode
from fusedmlp.contract.destinations.sharded_grad import local_weights
from fusedmlp.contract.queue import Operands, WgradQueue
from fusedmlp.contract.route import Route, Routes, route
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments, MLPGrads, MLPOutput, RowCopies
from fusedmlp.recipe import Formats

operators.register()

_Grads = tuple[Tensor | None, ...]


class Traced(Protocol):
    """Targets of the gradients of a call inside a graph, as `Call` uses them: `compiled.Traced`."""

    def enter_backward(self, dy: Tensor) -> None:
        """See `Call.enter_backward`."""

    def route(self, name: str, weights: list[Tensor], nodes: list[Any], mode: Mode) -> Route:
        """See `Call.route`."""


@dataclass(frozen=True)
class Call:
    """Arguments of one call of a layer, besides its tensors."""

    lengths: tuple[int, ...]  # how many tensors each weight and bias has: 1 packed, E per expert, 0 absent
    transposed: bool  # weights are stored [in, out]
    mode: Mode
    queue: WgradQueue | None
    impl: str
    activation: str = ""
    recipe: str = ""  # recipe.Formats.encoded
    saves_tokens: bool = False  # the 8-bit copy of x that wgrad multiplies, in place of x
    traced: Traced | None = None  # inside a graph

    def split(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """The groups that `lengths` counts, then a last one with the rest."""
        groups, start = [], 0
        for length in (*self.lengths, len(tensors) - sum(self.lengths)):
            groups.append(list(tensors[start : start + length]))
            start += length
        return groups

    def logical(self, weights: list[Tensor]) -> list[Tensor]:
        """`[out, in]` views of weights, or of the outputs of their gradients."""
        return [w.transpose(-1, -2) for w in weights] if self.transposed else weights

    def computed(self, weights: list[Tensor], x: Tensor, copy: Sequence[Tensor] = ()) -> list[Tensor]:
        """A weight as GEMMs take it: a copy from `quantize_weights`, or else as `logical`, in the dtype of x or dy."""
        return [*copy] or self.logical(weight_copies.computed(weights, x.dtype))

    def quantize_rows(self, x: Tensor, offsets: Tensor, weights: list[Tensor]) -> RowCopies:
        """Both copies of x, for products with these weights."""
        num_experts = weights[0].shape[0] if weights[0].dim() == 3 else len(weights)
        recipe = Formats.decode(self.recipe).gemms
        return RowCopies(*ops.quantize_rows(x, offsets, num_experts, recipe, self.impl))

    def source(self, x: Tensor) -> Tensor | None:
        """If x is not saved: a tensor without elements that depends on x, so that a second derivative by x raises."""
        if not self.saves_tokens or torch.compiler.is_compiling():
            return None
        with torch.enable_grad():
            return x[:0].clone()

    def local(self, weights: list[Tensor]) -> dict[Any, Tensor]:
        """Weights for `destinations/sharded_grad.py`: results of `.to_local()`, by graph node; empty inside a graph."""
        return {} if torch.compiler.is_compiling() else local_weights(weights)

    def enter_backward(self, dy: Tensor) -> None:
        """Run first in backward; does nothing outside of graphs, where `route` decides."""
        if self.traced is not None:
            self.traced.enter_backward(dy)

    def edges(self, ctx: Any) -> list[list[Any]]:
        """Per group and tensor: the node that its gradient flows to (True in a graph), or None if it gets none."""
        if self.traced is not None:
            return self.split([need or None for need in ctx.needs_input_grad[1:]])
        return self.split([node for node, _ in ctx.next_functions])

    def route(self, name: str, weights: list[Tensor], nodes: list[Any], ctx: Any, routes: Routes) -> Route:
        """Decide where the gradient of `weights` goes; add that to `routes`. `ctx` is the node that is running."""
        if self.traced is not None:
            return self.traced.route(name, weights, nodes, self.mode)
        return route(
            name,
            weights,
            nodes,
            ctx,
            self.mode,
            delayed=self.queue is not None,
            local_weights=ctx.local_weights,
            routes=routes,
        )

    def finish(
        self,
        route: Route,
        dy: Tensor | None,
        x: Tensor | None,
        offsets: Tensor,
        *,
        dy_row_ids: Tensor | None = None,
        x_row_ids: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Return what backward returns for a weight; queue its GEMM if it is delayed."""
        if route.delayed:
            assert self.queue is not None
            assert dy is not None
            assert x is not None
            operands = Operands(dy, x, offsets, dy_row_ids, x_row_ids)
            self.queue.put(route, operands, transposed=self.transposed, recipe=self.recipe, impl=self.impl)
        return route.finish()


def _no_forward_mode(ctx: Any, *tangents: Any) -> NoReturn:
    raise RuntimeError(
        "fusedmlp under forward-mode AD (torch.autograd.forward_ad, torch.func.jvp): expected reverse mode"
        " (torch.autograd.grad), or plain PyTorch"
    )


class GroupedLinear(torch.autograd.Function):
    """`apply(call, *weight, *bias, x, offsets) -> y`."""

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        """Run the GEMM; save its inputs."""
        weight, bias, (x, offsets) = call.split(tensors)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.local_weights = call, call.local(weight)
        y: Tensor = ops.grouped_gemm(x, call.computed(weight, x), bias, offsets, call.recipe, call.impl)
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: Sequence[Any], dy: Tensor, routes: Routes) -> _Grads:
        """Gradients in the order of forward's arguments."""
        call: Call = ctx.call
        weight, bias, (x, offsets) = call.split(saved)
        weight_nodes, bias_nodes, (x_node, *_) = call.edges(ctx)
        dy = dy.contiguous()
        call.enter_backward(dy)
        route = call.route("weight", weight, weight_nodes, ctx, routes)
        db = _bias_grads(bias, bias_nodes)
        need_dx, dw = x_node is not None, call.logical(route.outs)
        w = call.computed(weight, dy) if need_dx else []
        dx = operators.linear_backward(dy, x, w, offsets, dw, db, need_dx, route.accumulate, call.recipe, call.impl)
        return (None, *call.finish(route, dy, x, offsets), *_returned(db, bias), dx, None)


class GroupedMLP(torch.autograd.Function):
    """`apply(call, *fc1, *fc2, *bias1, *bias2, x, offsets, probs, row_ids, places, row_probs, *copies) -> y`.

    With row_ids, places and row_probs (of `types.RowOrder`), x, y and probs are per token: `[T, H]`, `[T, H]` and
    `[T, K]`. If they are None, x, y and probs are per row. `copies`: none, or those of fc1 and then of fc2, each as
    in `QuantizedWeights`. (A 16-bit copy is given once: Dynamo refuses a tensor that is two arguments.)
    """

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> Tensor:
        """Run both GEMMs; save the inputs and the pre-activation."""
        fc1, fc2, bias1, bias2, (x, offsets, probs, row_ids, places, row_probs, *copies) = call.split(tensors)
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
                    probs=probs if places is None else row_probs,
                    activation=call.activation,
                    recipe=call.recipe,
                    impl=call.impl,
                )
            )
        )
        at = sum(call.lengths)  # of x
        ctx.save_for_backward(*tensors[:at], tokens, *tensors[at + 1 :], out.h, tokens_scales, call.source(x))
        ctx.call, ctx.local_weights = call, call.local(fc1) | call.local(fc2)
        if places is None:
            return out.y
        return ops.combine(out.y, places, x.shape[0], call.impl)  # type: ignore[no-any-return]

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: Sequence[Any], dy: Tensor, routes: Routes) -> _Grads:
        """Gradients in the order of forward's arguments."""
        call: Call = ctx.call
        fc1, fc2, bias1, bias2, (x, offsets, probs, row_ids, places, row_probs, *rest) = call.split(saved)
        *copies, h, x_scales, _ = rest
        _, backward1, _, backward2 = _by_pass(copies)
        nodes1, nodes2, bias_nodes1, bias_nodes2, (x_node, *_) = call.edges(ctx)
        dy = dy.contiguous()
        call.enter_backward(dy)
        # fc2 first, as its GEMM runs first: both weights could be one parameter.
        route2 = call.route("fc2_weight", fc2, nodes2, ctx, routes)
        route1 = call.route("fc1_weight", fc1, nodes1, ctx, routes)
        db1, db2 = _bias_grads(bias1, bias_nodes1), _bias_grads(bias2, bias_nodes2)
        need_dx = x_node is not None
        grads = MLPGrads(
            *ops.grouped_mlp_backward_(
                *MLPBackwardArguments(
                    dw1=call.logical(route1.outs),
                    dw2=call.logical(route2.outs),
                    db1=db1,
                    db2=db2,
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
                    impl=call.impl,
                )
            )
        )
        dx = dprobs = None
        if need_dx:
            dx = grads.dx if places is None else ops.combine(grads.dx, places, x.shape[0], call.impl)
        if probs is not None and grads.dprobs is not None:
            dprobs = grads.dprobs if places is None else grads.dprobs.view_as(probs)
        # fc2 leaves a queue before fc1.
        dfc2 = call.finish(route2, dy, grads.act_probs, offsets, dy_row_ids=row_ids)
        dfc1 = call.finish(route1, grads.dh, x, offsets, x_row_ids=row_ids)
        db = _returned(db1, bias1) + _returned(db2, bias2)
        return (None, *dfc1, *dfc2, *db, dx, None, dprobs, None, None, None, *[None] * len(copies))


def _by_pass(copies: list[Any]) -> tuple[list[Any], ...]:
    """Copies of fc1 in forward and in backward, then of fc2: in 8 bits two tensors each, in 16 bits one for both."""
    if len(copies) == 8:
        return copies[:2], copies[2:4], copies[4:6], copies[6:]
    fc1, fc2 = copies[:1], copies[1:]
    return fc1, fc1, fc2, fc2


def _bias_grads(bias: list[Tensor], nodes: list[Any]) -> list[Tensor]:
    """Outputs for the bias gradients, which are always returned; empty if none is wanted."""
    if all(node is None for node in nodes):
        return []
    return [fresh_like(b) for b in bias]


def _returned(db: list[Tensor], bias: list[Tensor]) -> list[Tensor | None]:
    return [*db] if db else [None] * len(bias)
