"""Where the gradient of one weight goes in one backward, and what backward returns for it: the table of the package."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedmlp import environment
from fusedmlp.contract import destination, engine
from fusedmlp.contract.destination import Mode, Place
from fusedmlp.contract.dummy import remove_dummy_wgrad, set_dummy_wgrad
from fusedmlp.contract.engine import ACCUMULATE, CAPTURE, DROP, EngineUse
from fusedmlp.contract.forward_checks import refuse_reducer
from fusedmlp.contract.lock import refuse_compiled_elsewhere
from fusedmlp.contract.overwrite import give_back_overwrite, refuse_queued_overwrite, takes_overwrite
from fusedmlp.contract.parameter_state import ParameterState, state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients

_count = itertools.count()
_Leaf = tuple[int, Place, Tensor, ParameterState]  # a parameter whose gradient is accumulated, and its index


@dataclass(eq=False)
class Route:
    """Where the wgrad GEMM of one weight (packed: one tensor; else one per expert) writes in one backward.

    Run the GEMM into `outs`, adding to them if `accumulate`, and return `finish()` from backward. If `delayed`, queue
    the route; the queue then calls `open()`, runs the GEMM and calls `finish_delayed()`.
    """

    name: str
    params: list[Tensor]
    uses: list[EngineUse]
    mode: Mode  # resolved: never "auto"
    delayed: bool
    overwrites: list[bool] = field(default_factory=list)  # per parameter: replace what main_grad holds
    outs: list[Tensor] = field(default_factory=list)
    accumulate: bool = False
    waiting: bool = False  # in a queue
    order: int = field(default_factory=_count.__next__)
    _leaves: list[_Leaf] | None = None
    _fused: list[bool] = field(default_factory=list)
    _shared: dict[int, int] = field(default_factory=dict)  # expert -> the first one that has the same parameter

    def overwrites_param(self, param: Tensor) -> bool:
        """Whether it replaces what this parameter's main_grad holds."""
        return any(own is param and over for own, over in zip(self.params, self.overwrites, strict=True))

    @property
    def wanted(self) -> bool:
        """Whether any gradient of this weight is wanted at all."""
        return self.uses.count(DROP) < len(self.uses)

    @property
    def leaves(self) -> list[_Leaf]:
        """The parameters whose gradients are accumulated."""
        if self._leaves is None:
            packed = len(self.params) == 1
            self._leaves = [
                (i, (self.name, None if packed else i), param, state_of(param))
                for i, (param, use) in enumerate(zip(self.params, self.uses, strict=True))
                if use is ACCUMULATE
            ]
        return self._leaves

    def open(self, latest: Route | None = None) -> None:
        """Choose the outputs: `main_grad`, an existing `.grad`, or fresh tensors, for every parameter.

        `latest` is the last of those whose gradients the GEMM adds together with this one's.
        """
        targets: list[Tensor | None] = [None] * len(self.params)
        if self.mode == "grad":
            packed = len(self.params) == 1
            targets = [
                destination.existing_grad(param, (self.name, None if packed else i)) if use is ACCUMULATE else None
                for i, (param, use) in enumerate(zip(self.params, self.uses, strict=True))
            ]
        for i, place, param, state in self.leaves if self.mode == "main_grad" else ():
            targets[i] = destination.existing_main_grad(param, state, place)
            if state.queued:
                refuse_queued_overwrite(param, state, place, self, latest or self)
            if state.compiled_in is not None:
                refuse_compiled_elsewhere(state, place)
        self._fused = [target is not None for target in targets]
        self._shared = self._find_shared()
        existing = next((target for target in targets if target is not None), None)
        self.accumulate = any(fused and not over for fused, over in zip(self._fused, self.overwrites, strict=True))
        if existing is not None and existing.is_cuda and engine.inside_backward():
            engine.current_backward().join_stream(existing)
        first = self.params[self.uses.index(ACCUMULATE) if ACCUMULATE in self.uses else 0]
        dtype = destination.grad_dtype(first) if existing is None else existing.dtype
        self.outs = [
            self._own_output(self.params[i], existing, dtype) if target is None or i in self._shared else target
            for i, target in enumerate(targets)
        ]
        destination.check_group(self.name, self.outs)
        if self.accumulate and True in self.overwrites:
            for out, over in zip(self.outs, self.overwrites, strict=True):
                if over:
                    out.zero_()

    def _own_output(self, param: Tensor, existing: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A fresh output; beside existing ones it has their strides, gaps included."""
        if existing is None:
            return destination.fresh_like(param, dtype)
        out = torch.empty_strided(param.shape, existing.stride(), dtype=dtype, device=param.device)
        return out.zero_() if self.accumulate else out

    def _find_shared(self) -> dict[int, int]:
        """Experts may share a parameter: later ones get their own output, which is added to the first one's."""
        if len(set(map(id, self.params))) == len(self.params):
            return {}
        # What is returned for one parameter several times, autograd adds up.
        here = [i for i, fused in enumerate(self._fused) if fused or self.delayed]
        first = {id(self.params[i]): i for i in reversed(here)}
        return {i: owner for i in here if (owner := first[id(self.params[i])]) != i}

    def _close(self) -> list[Tensor]:
        """Forget the outputs, after adding up those of experts that share a parameter."""
        outs, self.outs = self.outs, []
        for i, owner in self._shared.items():
            outs[owner].add_(outs[i])
        return outs

    def finish(self) -> list[Tensor | None]:
        """After the GEMM: the gradients that backward returns."""
        if self.delayed or not self.wanted:
            return [None] * len(self.params)
        outs = self._close()
        if False not in self._fused:
            return [None] * len(outs)
        return [
            None if fused or use is DROP else out for use, fused, out in zip(self.uses, self._fused, outs, strict=True)
        ]

    def wait(self) -> None:
        """In a queue from now on, for everybody to see."""
        for _, _, _, state in self.leaves:
            if state.queued is None:
                state.queued = weakref.WeakSet()
            state.queued.add(self)
        self.waiting = True

    def leave(self) -> None:
        """In no queue any more."""
        self.waiting = False
        for _, _, _, state in self.leaves:
            if state.queued is not None:
                state.queued.discard(self)

    def finish_delayed(self) -> None:
        """Of a delayed wgrad, after the GEMM: `.grad` is set where there was none to add to."""
        for i, out in enumerate(self._close()):
            if not self._fused[i] and i not in self._shared and self.uses[i] is ACCUMULATE:
                self.params[i].grad = out

    def abandon(self) -> None:
        """The layer's backward failed, and its gradient has not arrived: who was to be overwritten still is."""
        for param, over in zip(self.params, self.overwrites, strict=False):
            if over:
                give_back_overwrite(param)


def route(
    name: str,
    weights: Sequence[Tensor],
    nodes: Sequence[Any],
    current_node: Any,
    mode: Mode,
    *,
    delayed: bool,
    recomputes_first_microbatch: bool,
    ddp_params: Set[int],
    routes: list[Route],
) -> Route:
    """Decide, inside backward, where the gradient of one weight goes; set flags and dummies.

    `nodes` are the graph nodes that the gradients of `weights` flow to, `current_node` the one that makes them. The
    parameter is taken from its node: checkpointing and saved-tensor hooks hand back weights that have lost their
    attributes. A gradient that somebody asked for (CAPTURE) is never delayed, nor are those of the same list. The route
    is added to `routes`, so that whoever called can abandon it, whatever fails. The rest is as in `autograd.Call`.
    """
    uses = [engine.engine_use(node, current_node) for node in nodes]
    params = [
        node.variable if use is ACCUMULATE else weight for node, use, weight in zip(nodes, uses, weights, strict=True)
    ]
    if mode == "auto":
        mode = destination.resolve_auto(name, params, [use is ACCUMULATE for use in uses])
    captured = CAPTURE in uses
    delayed = delayed and not captured and ACCUMULATE in uses
    if delayed and mode == "off":
        mode = "grad"  # when the queue runs, it adds to .grad itself or sets it
    result = Route(name, params, uses, mode, delayed, [False] * len(params))
    routes.append(result)
    leaves = result.leaves if mode == "main_grad" or delayed else []
    for i, place, param, state in leaves:
        if mode == "main_grad":
            if state.fsdp2 is not False or ddp_params:
                refuse_reducer(param, state, ddp_params, place, delayed)
            if state.step_begins is not None or hasattr(param, "overwrite_main_grad"):
                result.overwrites[i] = takes_overwrite(param, state, place, recomputes_first_microbatch)
            if delayed:  # what would fail when the queue runs
                destination.existing_main_grad(param, state, place)
        else:
            destination.refuse_tensor_hooks(param, place)
            destination.existing_grad(param, place)
    if result.wanted and not delayed:
        result.open()
    if mode == "main_grad":
        mark_fused(leaves)
    if captured:
        for node, use in zip(nodes, uses, strict=True):
            if use is CAPTURE and engine.is_leaf_node(node):
                remove_dummy_wgrad(node.variable)  # somebody may add to .grad what they asked for
    return result


def mark_fused(leaves: Sequence[_Leaf]) -> None:
    """Tell owners, where they gave parameters the flag, that gradients go to main_grad; `leaves` are a route's."""
    dense = environment.dense_dummy()
    for _, _, param, state in leaves:
        if hasattr(param, "grad_added_to_main_grad"):
            param.grad_added_to_main_grad = True
            set_dummy_wgrad(param, state, dense)
            if state.catch is None:  # the attribute has come since forward
                catch_plain_gradients(param, state)
