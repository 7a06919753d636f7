"""Where the gradient of one weight goes in one backward, and what backward returns for it: the table of the package."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from fusedmlp import environment
from fusedmlp.contract import destination, engine
from fusedmlp.contract.destination import Mode, Place
from fusedmlp.contract.dummy import remove_dummy_wgrad, set_dummy_wgrad
from fusedmlp.contract.engine import ACCUMULATE, CAPTURE, DROP, EngineUse
from fusedmlp.contract.exclusion import Held, hold_others
from fusedmlp.contract.lending import reclaim
from fusedmlp.contract.overwrite import give_back_overwrite, refuse_other_writers, takes_overwrite
from fusedmlp.contract.parameter_state import GRADIENT, Queued, find_states, states_of
from fusedmlp.contract.plain_gradient import adopt_plain_gradient, catch_plain_gradients
from fusedmlp.contract.reducers import find_reducers, refuse_reducer
from fusedmlp.contract.sharded import local_grad, sharded_leaf

_orders = count()
_Leaf = tuple[int, Tensor, Any]  # index, parameter and ParameterState, if the engine accumulates its gradient


@dataclass(eq=False)
class Route(Queued):
    """Where the wgrad GEMM of one weight (packed: one tensor; else one per expert) writes in one backward.

    Run the GEMM into `outs`, adding to them if `accumulate`, and return `finish()` from backward. If `delayed`, queue
    the route; the queue then calls `open()`, runs the GEMM and calls `finish_delayed()`.
    """

    name: str
    uses: list[EngineUse]
    mode: Mode  # resolved: never "auto"
    delayed: bool
    outs: list[Tensor] = field(default_factory=list)
    accumulate: bool = False
    recomputes_first_microbatch: bool = False  # see autograd.layers.Call
    _fused: list[bool] = field(default_factory=list)  # per parameter: written in place, nothing to return
    _shared: dict[int, int] = field(default_factory=dict)  # expert -> the first expert with the same parameter
    held: Held | None = None  # hooks that hold other threads while the GEMM adds to `.grad`; `open()`'s caller releases
    _leaves: list[_Leaf] | None = None
    sharded: list[tuple[int, Any, Tensor]] = field(default_factory=list)  # index, node of `.to_local()`, DTensor leaf

    @property
    def leaves(self) -> list[_Leaf]:
        """The parameters whose gradients are accumulated."""
        if self._leaves is None:
            # Only modes that need a state create one: its weak reference makes `swap_tensors` refuse the parameter.
            find = states_of if self.mode == "main_grad" or self.delayed else find_states
            leaves = zip(count(), self.params, find(self.params))
            self._leaves = [leaf for leaf, use in zip(leaves, self.uses, strict=True) if use is ACCUMULATE]
        return self._leaves

    def place(self, i: int) -> Place:
        """The name of parameter `i` in errors."""
        return self.name, None if len(self.params) == 1 else i

    def open(self, latest: Route | None = None) -> None:
        """Choose the outputs: `main_grad`, an existing `.grad`, or fresh tensors, for every parameter.

        `latest`: the last of the routes that the GEMM computes together with this one.
        """
        targets: list[Tensor | None] = [None] * len(self.params)
        if self.mode == "grad":
            targets = self._existing_grads()
        if self.mode == "main_grad":
            targets = self._main_grads()
            for i, param, state in self.leaves:
                if state.queued or state.compiled_in is not None:
                    refuse_other_writers(param, state, self.place(i), self, latest or self)
        if len(set(map(id, self.params))) < len(self.params):
            ids = [*map(id, self.params)]  # later experts of a shared parameter have outputs of their own
            self._shared = {i: ids.index(key) for i, key in enumerate(ids) if ids.index(key) < i}
            targets = [None if i in self._shared else target for i, target in enumerate(targets)]
        self._fused = [target is not None for target in targets]
        existing = next((target for target in targets if target is not None), None)
        if existing is None:
            dtype = destination.grad_dtype(self.params[self.uses.index(ACCUMULATE) if ACCUMULATE in self.uses else 0])
            self.outs = [destination.fresh_like(param, dtype) for param in self.params]
        else:  # fresh outputs beside it have its strides, gaps included
            if existing.is_cuda and engine.inside_backward():
                engine.current_backward().join_stream(existing)
            self.outs = [
                existing.new_empty_strided(existing.shape, existing.stride()) if target is None else target
                for target in targets
            ]
        if existing is None or self.mode != "main_grad":
            destination.check_group(self.name, self.outs)
        # Last, as it changes state: after an error above, a queue that runs again must decide anew.
        if self.mode == "main_grad":
            for i, param, state in self.leaves:
                if not self.delayed or state.buffer is not None:
                    self._settle_overwrite(i, param, state)
        if True not in self.overwrites:
            if False not in self._fused:
                self.accumulate = True
                return
        elif self.mode == "main_grad":
            for i, _, state in self.leaves:
                if self.overwrites[i]:
                    state.began = self.order
        self.accumulate = any(fused and not over for fused, over in zip(self._fused, self.overwrites, strict=True))
        if self.accumulate:
            for out, fused, over in zip(self.outs, self._fused, self.overwrites, strict=True):
                if over or not fused:
                    out.zero_()

    def _main_grads(self) -> list[Tensor | None]:
        """The `main_grad` of every parameter whose gradient is accumulated, checked."""
        leaves = self.leaves
        targets: list[Tensor | None] = [None] * len(self.params)
        alike = destination.alike_main_grads(self.params) if len(leaves) == len(self.params) else None
        if alike is not None:
            targets[:] = alike
        else:
            for i, param, _ in leaves:
                targets[i] = destination.existing_main_grad(param, self.place(i))
            destination.check_group(self.name, [target for target in targets if target is not None])
        if len(set(map(id, targets))) < len(targets):
            destination.refuse_common([(self.place(i), param, targets[i]) for i, param, _ in leaves])
        for i, param, state in leaves:
            hooks = param._backward_hooks
            if hooks and (len(hooks) > 1 or state.catch is None or state.catch.id not in hooks):
                destination.refuse_tensor_hooks(param, self.place(i))
        return targets

    def _settle_overwrite(self, i: int, param: Tensor, state: Any) -> None:
        """Decide whether the gradient overwrites `main_grad`; in backward, also adopt a plain gradient.

        For a delayed gradient of a buffer's parameter this is decided when its GEMM runs: another may arrive before.
        """
        if state.holds is not GRADIENT or state.grad_is_main or hasattr(param, "overwrite_main_grad"):
            self.overwrites[i] = takes_overwrite(param, state, self.place(i), self.recomputes_first_microbatch)
        in_backward = not self.delayed or state.buffer is None
        if in_backward and param.grad is not None and not getattr(param, "grad_added_to_main_grad", True):
            self.overwrites[i] = adopt_plain_gradient(param, state, self.overwrites[i])

    def _check_delayed(self) -> None:
        """Raise now for errors that the queue would meet; decide about overwriting, except in buffers."""
        if self.mode == "main_grad":
            self._main_grads()
        for i, param, state in self.leaves:
            destination.refuse_late_hooks(param, self.place(i))
            if self.mode == "grad":
                destination.refuse_tensor_hooks(param, self.place(i))
                destination.existing_grad(param, self.place(i))
            elif state.buffer is None:
                self._settle_overwrite(i, param, state)

    def _existing_grads(self) -> list[Tensor | None]:
        """The `.grad`s to which the GEMM adds, per parameter; makes other threads wait until it has."""
        targets: list[Tensor | None] = [None] * len(self.params)
        for _, param, state in self.leaves:
            if state is not None and state.lent is not None:
                reclaim(param, state)
        leaves = [leaf for leaf in self.leaves if self.delayed or leaf[1].grad is not None]
        if not leaves and not self.sharded:
            return targets
        params = [param for _, param, _ in leaves] + [param for _, _, param in self.sharded]
        self.held = hold_others([param for param in params if self.delayed or param.is_cpu])
        for i, param, _ in leaves:
            if self._may_add(param):
                targets[i] = destination.existing_grad(param, self.place(i), returnable=not self.delayed)
        for i, node, param in self.sharded:
            if self._may_add(param):
                targets[i] = local_grad(node, param, self.params[i], self.place(i))
        return targets if self.delayed else destination.of_one_kind(targets)

    def _may_add(self, param: Tensor) -> bool:
        """True if this route may accumulate into a parameter. Otherwise AccumulateGrad has to: another thread may be
        adding, which `held` says by None. No other thread adds to a frozen parameter.
        """
        return self.held is not None or not param.requires_grad

    def finish(self) -> list[Tensor | None]:
        """After the GEMM: what backward returns; None where the GEMM added, is delayed, or no gradient is wanted."""
        outs, self.outs = self.outs, []
        for i, first in self._shared.items():
            outs[first].add_(outs[i])
            self._fused[i] = True  # as part of the first one
        if False not in self._fused:
            return [None] * len(self.params)
        return [
            None if fused or use is DROP else out for use, fused, out in zip(self.uses, self._fused, outs, strict=True)
        ]

    def wait(self) -> None:
        """Mark as queued."""
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
        """After the GEMM of a delayed wgrad: set `.grad` where there was none to add to.

        Returns `(parameter, gradient)` pairs that AccumulateGrad must add, as another thread may be adding to `.grad`.
        """
        left = []
        for param, grad in zip(self.params, self.finish(), strict=True):
            if grad is not None and self._may_add(param):
                param.grad = grad
            elif grad is not None:
                left.append((param, grad))
        return left

    def abandon(self) -> None:
        """After the layer's backward failed: if it was to overwrite `main_grad`, let the next gradient do so."""
        for param, over in zip(self.params, self.overwrites, strict=True):
            if over:
                give_back_overwrite(param)


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
    recomputes_first_microbatch: bool,
    local_weights: dict[Any, Tensor],
    routes: Routes,
) -> Route:
    """Decide, inside backward, where the gradient of one weight goes; set flags and dummies.

    `nodes` are the graph nodes to which the gradients of `weights` flow, `current_node` the one that computes them. The
    parameter is taken from its node: checkpointing and saved-tensor hooks hand back weights that have lost their
    attributes. A captured gradient (CAPTURE) is never delayed, nor are the others of the same weight. `local_weights`:
    see `sharded.py`. The route is added to `routes`. The other arguments are as in `autograd.layers.Call`.
    """
    known = engine.accumulates_into(nodes)  # the usual case
    if known is not None:
        params, uses = known, [ACCUMULATE] * len(known)
    else:
        uses = [engine.engine_use(node, current_node) for node in nodes]
        params = [n.variable if use is ACCUMULATE else w for n, use, w in zip(nodes, uses, weights, strict=True)]
    if mode == "auto":
        mode = destination.resolve_auto(name, params, [use is ACCUMULATE for use in uses])
    captured = CAPTURE in uses
    delayed = delayed and not captured and ACCUMULATE in uses
    if delayed and mode == "off":
        mode = "grad"  # when the queue runs, it adds to .grad itself or sets it
    elif mode == "grad" and not delayed and (routes.recorded or engine.inside_compiled_autograd()):
        mode = "off"  # PyTorch then adds out of place, with a graph, and needs the gradient returned
    order = routes[0].order if routes else next(_orders)
    result = Route(params, [False] * len(params), order, name, uses, mode, delayed)
    result.recomputes_first_microbatch = recomputes_first_microbatch
    if local_weights and mode == "grad":
        found = [(i, node, sharded_leaf(node, local_weights.get(node))) for i, node in enumerate(nodes)]
        result.sharded = [(i, node, leaf) for i, node, leaf in found if leaf is not None]
    routes.append(result)
    leaves = result.leaves if mode == "main_grad" or delayed else []
    if leaves and (reducers := find_reducers()):
        for i, param, state in leaves:
            refuse_reducer(param, state, reducers, result.place(i), delayed)
    if delayed:
        result._check_delayed()
    if not delayed and uses.count(DROP) < len(uses):
        result.open()
    if mode == "main_grad":
        mark_fused(leaves)
    if captured:
        for node, use in zip(nodes, uses, strict=True):
            if use is CAPTURE and engine.is_leaf_node(node):
                remove_dummy_wgrad(node.variable)  # the caller may add the captured gradient to .grad
    return result


def mark_fused(leaves: Sequence[_Leaf]) -> None:
    """Set the flag and the dummy of parameters with `grad_added_to_main_grad`; `leaves` are those of a `Route`."""
    flagged = [leaf for leaf in leaves if hasattr(leaf[1], "grad_added_to_main_grad")]
    dense = bool(flagged) and environment.dense_dummy()
    for _, param, state in flagged:
        param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        set_dummy_wgrad(param, state, dense)
        if state.catch is None:  # the attribute was set after forward
            catch_plain_gradients(param, state)
