"""One call of a layer: its constants, and how its backward asks the gradient contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedmlp import lora
from fusedmlp.autograd import weight_copies
from fusedmlp.contract.destinations.destination import Route
from fusedmlp.contract.destinations.sharded_grad import local_weights
from fusedmlp.contract.queue import Operands, WgradQueue
from fusedmlp.contract.route import Mode, Routes, route
from fusedmlp.operators import ops
from fusedmlp.operators.types import RowCopies
from fusedmlp.recipe import Formats


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
    batch_invariant: bool = False
    scalings: tuple[float, ...] = ()  # of adapters, one for each weight; empty without adapters
    traced: Any = None  # inside a graph: compiled.Traced

    def split(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """The groups that `lengths` counts, then a last one with the rest."""
        rest, groups, start = list(tensors), [], 0
        for length in self.lengths:
            groups.append(rest[start : start + length])
            start += length
        groups.append(rest[start:])
        return groups

    def logical(self, weights: list[Tensor]) -> list[Tensor]:
        """`[out, in]` views of weights, or of the outputs of their gradients."""
        return [w.transpose(-1, -2) for w in weights] if self.transposed else weights

    def computed(self, weights: list[Tensor], x: Tensor, copy: Sequence[Tensor] = ()) -> list[Tensor]:
        """A weight as GEMMs take it: a copy from `quantize_weights`, or else as `logical`, in the dtype of x or dy."""
        return [*copy] or self.logical(weight_copies.computed(weights, x.dtype))

    def adapter(self, tensors: list[Tensor], weight: int, x: Tensor) -> list[Tensor]:
        """The adapter of a weight as operators take it, in the dtype of x or dy."""
        if not tensors:
            return []
        return lora.computed(tensors, self.scalings[weight], x.dtype, self.transposed, self.impl)

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
            return self.traced.route(name, weights, nodes)  # type: ignore[no-any-return]
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
