"""Where the gradient of one weight goes in one backward, and what backward returns for it: the table of the package."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from fusedmlp.contract import checks, engine
from fusedmlp.contract.destinations.choice import Mode, choose
from fusedmlp.contract.destinations.destination import Destination, Targets
from fusedmlp.contract.dummy import remove_dummy_wgrad
from fusedmlp.contract.engine import ACCUMULATE, CAPTURE, DROP, Backward
from fusedmlp.contract.owners.refusal import present_owners, refuse_owner
from fusedmlp.contract.parameter_state import WeightGradient, find_states, states_of


@dataclass(eq=False, kw_only=True)
class Route(WeightGradient):
    """The way of one weight's gradient in one backward.

    Run the GEMM into `outs`, adding to them if `accumulate`, and return `finish()` from backward. If `delayed`, queue
    the route; the queue then calls `open()`, runs the GEMM and calls `finish_delayed()`.
    """

    destination: Destination
    targets: Targets = field(default_factory=list)  # what the GEMM writes in place; None: fresh, and returned
    outs: list[Tensor] = field(default_factory=list)  # from `open()` until `finish()`: one for each parameter
    accumulate: bool = False
    returns: bool = False  # some outputs are fresh
    _shared: dict[int, int] = field(default_factory=dict)  # expert -> the first expert with the same parameter

    def open(self) -> None:
        """Choose the outputs for every parameter: tensors of the destination, or fresh ones."""
        existing = targets = self.destination.open(self)
        if len(set(map(id, self.params))) < len(self.params):
            ids = [*map(id, self.params)]  # later experts of a shared parameter have outputs of their own
            self._shared = {i: ids.index(key) for i, key in enumerate(ids) if ids.index(key) < i}
            targets = [None if i in self._shared else target for i, target in enumerate(targets)]
        self.targets, self.accumulate = targets, False
        present = [target for target in targets if target is not None]
        self.returns = len(present) < len(targets)
        if not present:
            dtype = checks.grad_dtype(self.params[self.uses.index(ACCUMULATE) if ACCUMULATE in self.uses else 0])
            self.outs = [checks.fresh_like(param, dtype) for param in self.params]
        else:  # fresh outputs beside others have their strides, gaps included
            first = present[0]
            if first.is_cuda and engine.inside_backward():
                engine.current_backward().join_stream(first)
            self.outs = present
            if self.returns:
                like = first.shape, first.stride()
                self.outs = [first.new_empty_strided(*like) if target is None else target for target in targets]
        if not present or not self.destination.beside_grad:  # such destinations have checked theirs
            checks.check_group(self.name, self.outs)
        self.destination.decide(self, existing)
        if not self.returns and not self.overwrites:
            self.accumulate = True
            return
        adds = [t is not None and id(p) not in self.overwrites for t, p in zip(targets, self.params, strict=True)]
        self.accumulate = True in adds
        if self.accumulate:
            for out, add in zip(self.outs, adds, strict=True):
                if not add:
                    out.zero_()

    def finish(self) -> Targets:
        """After the GEMM: what backward returns; None where the GEMM added, is delayed, or no gradient is wanted."""
        outs, self.outs = self.outs, []
        if not self.returns:
            return [None] * len(self.params)
        for i, first in self._shared.items():
            outs[first].add_(outs[i])
        return [
            None if target is not None or use is DROP or i in self._shared else out
            for i, (target, use, out) in enumerate(zip(self.targets, self.uses, outs, strict=True))
        ]

    def wait(self, backward: Backward) -> None:
        """Mark as queued in a backward."""
        self.backward = backward
        for _, _, state in self.leaves:
            if state.queued is None:
                state.queued = weakref.WeakSet()
            state.queued.add(self)

    def leave(self) -> None:
        """Mark as no longer queued."""
        for _, _, state in self.leaves:
            if state.queued is not None:
                state.queued.discard(self)

    def finish_delayed(self) -> list[tuple[Tensor, Tensor]]:
        """After the GEMM of a delayed gradient; returns `(parameter, gradient)` pairs that AccumulateGrad must add."""
        return self.destination.keep(self, self.finish())


class Routes(list[Route]):
    """The routes of one backward of a layer; its caller abandons them if anything fails."""

    def __init__(self, *, recorded: bool) -> None:
        self.recorded = recorded  # under create_graph=True


def route(
    name: str,
    weights: Sequence[Tensor],
    nodes: Sequence[Any],
    current_node: Any,
    mode: Mode,
    *,
    delayed: bool,
    local_weights: dict[Any, Tensor],
    routes: Routes,
) -> Route:
    """Decide, inside backward, where the gradient of one weight goes; set flags and dummies.

    `nodes` are the graph nodes to which the gradients of `weights` flow, `current_node` the one that computes them. The
    parameter is taken from its node: checkpointing and saved-tensor hooks hand back weights that have lost their
    attributes. A captured gradient (CAPTURE) is never delayed, nor are the others of the same weight. `local_weights`:
    see `destinations/sharded_grad.py`. The route is added to `routes`. The other arguments are as in
    `autograd.layers.Call`.
    """
    known = engine.accumulates_into(nodes)  # the usual case
    if known is not None:
        params, uses = known, [ACCUMULATE] * len(known)
    else:
        uses = [engine.engine_use(node, current_node) for node in nodes]
        params = [
            node.variable if use is ACCUMULATE else local_weights.get(node, weight)
            for node, use, weight in zip(nodes, uses, weights, strict=True)
        ]
    captured = CAPTURE in uses
    delayed = delayed and not captured and ACCUMULATE in uses
    recorded = routes.recorded or engine.inside_compiled_autograd()
    destination = choose(mode, name, params, uses, delayed, recorded)
    # Only destinations that need a state create one: its weak reference makes `swap_tensors` refuse the parameter.
    needs_states = destination.beside_grad or delayed
    leaves = zip(count(), params, (states_of if needs_states else find_states)(params))
    result = Route(
        name=name,
        params=params,
        uses=uses,
        leaves=[leaf for leaf, use in zip(leaves, uses, strict=True) if use is ACCUMULATE],
        delayed=delayed,
        destination=destination,
    )
    routes.append(result)
    if needs_states and (owners := present_owners()):
        for i, param, _ in result.leaves:
            refuse_owner(param, owners, result.place(i), "" if delayed else destination.name)
    if delayed:
        destination.refuse_late(result)
    elif uses.count(DROP) < len(uses):
        result.open()
    destination.written(result)
    if captured:
        for node, use in zip(nodes, uses, strict=True):
            if use is CAPTURE and engine.is_leaf_node(node):
                remove_dummy_wgrad(node.variable)  # the caller may add the captured gradient to .grad
    return result
