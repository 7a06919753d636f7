"""A weight's gradient in one backward (`Route`), and the protocol of the places to which GEMMs write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from torch import Tensor

from fusedmlp.contract import checks, engine
from fusedmlp.contract.engine import ACCUMULATE, DROP, Backward, EngineUse
from fusedmlp.contract.group import WeightGroup, group_of
from fusedmlp.contract.parameter_state import (
    Leaf,
    ParameterState,
    Place,
    accumulation_lock,
    find_states,
    states_of,
)

Targets = list[Tensor | None]  # per parameter: the tensor that a GEMM writes to; None: a fresh one, which is returned


class Destination:
    """A place for the gradients of a weight: of one packed parameter, or of one for each expert.

    A destination has no state: `Route` has that of one weight in one backward, `ParameterState` that of a parameter.
    Its methods are called in the order in which they stand here. By default every gradient is returned.
    """

    name = ""  # the value of `accumulate_wgrad` that asks for it
    automatic = True  # "auto" looks for it
    beside_grad = False  # gradients go past `.grad`: refused for parameters whose `.grad` something reduces
    may_trace = False  # `torch.compile` may keep its tensors from one step to the next
    title = ""  # a parameter that has it, in messages
    if_delayed = ""  # the name of what takes its place for delayed gradients
    if_recorded = ""  # the same under `create_graph=True` and in compiled autograd

    def find(self, params: Sequence[Tensor]) -> list[bool]:
        """Find it, in forward and in backward: tell which parameters have it. Allocates nothing.

        "auto" takes the first destination that is found. One that is asked for by name is taken in any case: then
        `open` makes the tensors that are missing, or raises.
        """
        return [True] * len(params)

    def enter(self, param: Tensor, state: ParameterState) -> None:
        """Register in forward, for a leaf that requires grad, what its backward needs.

        One that lets plain gradients be caught says so in `state.home`; the catch then asks `tensors`.
        """

    def refuse(self, param: Tensor, place: Place) -> None:
        """Raise in forward, early, if a GEMM could not write there: called where it was asked for by name, for leaves
        that require grad, until they have passed once. `open` and `refuse_late` must find the same.
        """

    def refuse_late(self, route: Route) -> None:
        """Raise in backward, before a gradient is queued, for what `open` would when the queue runs, and for hooks that
        run before (`checks.refuse_late_hooks`).
        """

    def open(self, route: Route) -> Targets:
        """Choose before the GEMM, in backward or when the queue runs, the tensors that it adds to, or raise.

        They are alike in dtype, shape and strides (`checks.check_group`), and no two parameters have one in common.
        `route.leaves` may have a parameter twice, if experts share it.
        """
        return [None] * len(route.params)

    def decide(self, route: Route, targets: Targets) -> None:
        """Put into `route.overwrites`, after `open`, the ids of parameters whose tensor the GEMM overwrites.

        The last thing before the GEMM, as it may change states: what fails earlier can run again.
        """

    def written(self, route: Route) -> None:
        """Tell the owners, in backward, that gradients are there, or will be when the queue has run."""

    def undo(self, route: Route) -> None:
        """Take back what was decided, after the layer's backward failed; tensors that it made may stay."""

    def keep(self, route: Route, grads: Targets) -> list[tuple[Tensor, Tensor]]:
        """Keep, after a queue's GEMM, the gradients that had no tensor to go to (one for each parameter, or None).

        Returns `(parameter, gradient)` pairs that AccumulateGrad must add.
        """
        return []

    def tensors(self, params: Sequence[Tensor]) -> Targets:
        """The tensors of these parameters, for the catch of plain gradients and for diagnoses; None: it has none."""
        return [param.grad for param in params]


@dataclass(eq=False, kw_only=True)
class Route:
    """The way of one weight's gradient in one backward.

    Run the GEMM into `outs`, adding to them if `accumulate`, and return `finish()` from backward. If `delayed`, queue
    the route; the queue then calls `open()`, runs the GEMM and calls `finish_delayed()`.
    """

    name: str
    params: list[Tensor]  # one packed, or one for each expert
    uses: list[EngineUse]
    destination: Destination
    delayed: bool
    group: WeightGroup | None = None  # if the engine accumulates the gradients of all
    # A delayed one:
    backward: Backward | None = None
    last: Backward | None = None  # whose gradients the same GEMM computes
    asked: set[int] = field(default_factory=set)  # ids of parameters with `overwrite_main_grad`
    # From `open()` until `finish()`:
    overwrites: set[int] = field(default_factory=set)  # ids of parameters whose gradient the GEMM replaces
    targets: Targets = field(default_factory=list)  # what the GEMM writes in place; None: fresh, and returned
    outs: list[Tensor] = field(default_factory=list)  # one for each parameter
    accumulate: bool = False
    returns: bool = False  # some outputs are fresh
    _shared: dict[int, int] = field(default_factory=dict)  # expert -> the first expert with the same parameter
    # AccumulateGrad nodes, and handles of their hooks, from `hold_others()` to `release()`. None: another thread may be
    # adding.
    held: list[tuple[Any, Any]] | None = None

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The parameters whose gradients are accumulated, with their states, if a state is there or needed: its weak
        reference makes `swap_tensors` refuse the parameter.
        """
        states = (states_of if self.delayed or self.destination.beside_grad else find_states)(self.params)
        leaves = zip(count(), self.params, states, strict=False)
        return [leaf for leaf, use in zip(leaves, self.uses, strict=True) if use is ACCUMULATE]

    def place(self, i: int) -> Place:
        """The name of parameter `i` in errors."""
        return self.name, None if len(self.params) == 1 else i

    def may_add(self, param: Tensor) -> bool:
        """True if the GEMM may add to `.grad` of a parameter, and AccumulateGrad need not. No other thread adds to a
        frozen parameter.
        """
        return self.held is not None or not param.requires_grad

    def hold_others(self, params: Sequence[Tensor]) -> None:
        """Until `release`, make other threads wait before they accumulate into `params`; the caller holds the lock.

        AccumulateGrad adds without the GIL and without the lock, so it gets a hook that waits. A backward that is
        already running in another thread may have passed the hook: then PyTorch adds instead of a GEMM. A GPU needs
        none of this inside a backward: one thread of the engine runs all nodes of a device.
        """
        self.held = []
        if not params or not engine.other_threads():  # only this thread could start one, and it is busy here
            return
        if engine.others_run_backward():
            self.held = None
            return
        nodes = [engine.accumulating_node(param) for param in params if param.requires_grad]
        self.held = [(node, node.register_prehook(_wait)) for node in nodes]
        if engine.others_run_backward():  # it may have passed the node before the hook was there
            self.release()
            self.held = None

    def release(self) -> None:
        """Let other threads go on; called after the GEMM, whether it failed or not."""
        for _, handle in self.held or ():
            handle.remove()

    def open(self) -> None:
        """Choose the outputs for every parameter: tensors of the destination, or fresh ones."""
        if self.delayed and self.group is not None:  # what backward saw may have changed
            self.group = group_of(self.params)
        self.overwrites = set()  # an earlier run of a queue may have failed
        self.targets = targets = self.destination.open(self)
        first = next((target for target in targets if target is not None), None)
        if self.group is not None and targets is self.group.memory:  # distinct and alike
            self.outs, self.returns = self.group.memory, False
        else:
            self._choose_outs(targets, first)
        if first is not None and first.is_cuda and engine.inside_backward():
            engine.current_backward().join_stream(first)
        self.destination.decide(self, targets)
        if not self.returns and len(self.overwrites) in (0, len(self.params)):
            self.accumulate = not self.overwrites
            return
        added = [
            target is not None and id(param) not in self.overwrites
            for target, param in zip(self.targets, self.params, strict=True)
        ]
        self.accumulate = True in added
        if self.accumulate and False in added:
            for out, adds in zip(self.outs, added, strict=True):
                if not adds:
                    out.zero_()

    def _choose_outs(self, targets: Targets, first: Tensor | None) -> None:
        """Make the outputs that are missing, like `first`, one that is there."""
        if len(set(map(id, self.params))) < len(self.params):
            ids = [*map(id, self.params)]  # later experts of a shared parameter have outputs of their own
            self._shared = {i: ids.index(key) for i, key in enumerate(ids) if ids.index(key) < i}
            self.targets = targets = [None if i in self._shared else target for i, target in enumerate(targets)]
        self.returns = type(None) in map(type, targets)
        if first is None:
            dtype = checks.grad_dtype(self.params[self.uses.index(ACCUMULATE) if ACCUMULATE in self.uses else 0])
            self.outs = [checks.fresh_like(param, dtype) for param in self.params]
        else:  # fresh outputs beside others have their strides, gaps included
            like = first.shape, first.stride()
            self.outs = [first.new_empty_strided(*like) if target is None else target for target in targets]
        if first is None or not self.destination.beside_grad:  # such destinations have checked theirs
            checks.check_group(self.name, self.outs)

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

    def finish_delayed(self) -> list[tuple[Tensor, Tensor]]:
        """After the GEMM of a delayed gradient; returns `(parameter, gradient)` pairs that AccumulateGrad must add."""
        return self.destination.keep(self, self.finish())


def _wait(grads: Targets) -> None:
    with accumulation_lock:
        pass
