"""State of a parameter that the contract keeps from one call to the next, and the lock held while it changes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fusedmlp.contract.engine import Backward

# Held while a layer's gradients are computed and added: two threads that run backward on the CPU could otherwise add
# to one main_grad at once, and one of the sums would be lost.
accumulation_lock = threading.RLock()


def release_interrupted() -> None:
    """Release the lock if an interrupt, just before a `with` ended, left it held; called outside of such blocks."""
    while accumulation_lock._is_owned():  # type: ignore[attr-defined]
        accumulation_lock.release()


Place = tuple[str, int | None]  # a parameter in messages: the weight's name, and the expert (None: packed, all)
Leaf = tuple[int, Tensor, Any]  # index, parameter and ParameterState, if the engine accumulates its gradient


class ParameterState:
    """State of one parameter, from its first use until it is freed; does not keep the parameter alive."""

    # fmt: off
    __slots__ = ("accumulates_in", "catch", "compiled_in", "consumers", "decided", "dummy", "entered", "group", "home",
                 "memory", "overwritten_in", "ref", "replaced_by", "rounded", "rounds")
    # fmt: on

    def __init__(self, param: Tensor) -> None:
        # The callback is C code alone: an interrupt in Python code could leave the state to a new parameter of this id.
        self.ref = weakref.ref(param, partial(_states.pop, id(param)))
        # `.grad`: memory.py and steps.py
        self.memory: Tensor | None = None  # what a MainGradBuffer lends to it
        self.group: Any = None  # group.WeightGroup: the last one that this parameter is the first of
        self.consumers: list[RemovableHandle] = []  # of hooks, while memory is lent
        self.decided = False  # the pre-hook has seen the gradient that is being accumulated
        self.accumulates_in: torch.dtype | None = None  # FP32Accumulation: the dtype of `.grad`; None: its own
        self.rounds = False  # `.grad` is rounded to the dtype of the parameter while optimizers step
        self.rounded: Any = None  # steps.Rounded, meanwhile
        self.replaced_by = ""  # what gave the model another parameter in its place
        # `main_grad` of an owner
        self.home: Any = None  # the `destinations.Destination` of its fused gradients
        self.catch: RemovableHandle | None = None  # plain_gradient.py: the handle of the hook
        self.dummy: Tensor | None = None  # dummy.py: the dummy wgrad
        self.overwritten_in: Backward | None = None  # with `overwrite_main_grad`: the last backward that overwrote
        self.entered = ""  # forward_checks.py: the mode of the last forward that passed all checks
        self.compiled_in: Backward | None = None  # compiled.py: the backward whose graph adds to main_grad


_states: dict[int, ParameterState] = {}  # by id
queues: dict[int, weakref.ref[Any]] = {}  # by id, every `WgradQueue` that is alive and has been used


def waiting() -> list[Any]:
    """The routes of all gradients that wait in a queue, in any thread."""
    alive = [queue() for queue in [*queues.values()]]
    return [route for queue in alive if queue is not None for route in queue.routes()]


def ids_waiting() -> set[int]:
    """The ids of parameters with a gradient that waits in a queue."""
    return {id(param) for route in waiting() for _, param, _ in route.leaves}


def find_state(param: Tensor) -> ParameterState | None:
    """The state of a parameter, if it has one."""
    return _states.get(id(param))


def find_states(params: Sequence[Tensor]) -> list[ParameterState | None]:
    """The state of each parameter, if it has one."""
    return [*map(_states.get, map(id, params))]


def states_of(params: Sequence[Tensor]) -> list[Any]:
    """The state of each parameter, as `state_of`; one lookup for all if every one exists."""
    states = find_states(params)
    return [*map(state_of, params)] if None in states else states


def state_of(param: Tensor) -> ParameterState:
    """The state of a parameter, created if there is none.

    It has a weak reference to the parameter, so that `torch.utils.swap_tensors` then refuses the parameter.
    """
    state = _states.get(id(param))
    if state is None:
        state = _states.setdefault(id(param), ParameterState(param))  # or that of a thread that was faster
    return state
