"""State of a parameter that the contract keeps from one call to the next, and the lock held while it changes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fusedmlp.contract.engine import Backward, EngineUse
from fusedmlp.contract.states import GRADIENT, TRANSITIONS, Event

# Held while a layer's gradients are computed and added: two threads that run backward on the CPU could otherwise add
# to one main_grad at once, and one of the sums would be lost.
accumulation_lock = threading.RLock()


def release_interrupted() -> None:
    """Release the lock if an interrupt, just before a `with` ended, left it held; called outside of such blocks."""
    while accumulation_lock._is_owned():  # type: ignore[attr-defined]
        accumulation_lock.release()


class Lent(NamedTuple):
    """A gradient in the dtype of its parameter, lent to an optimizer or inside `as_grad`."""

    rounded: Tensor  # `.grad` meanwhile
    version: int  # of `rounded` when it was lent: a larger one shows that it was edited
    exact: Tensor  # `rounded` is a copy of it
    takes_gradients: bool  # whether a backward meanwhile reclaims the exact tensor; otherwise it raises


Place = tuple[str, int | None]  # a parameter in messages: the weight's name, and the expert (None: packed, all)
Leaf = tuple[int, Tensor, Any]  # index, parameter and ParameterState, if the engine accumulates its gradient


@dataclass(eq=False)
class WeightGradient:
    """The gradient of one weight in one backward, as destinations and later gradients see it; a `route.Route`."""

    name: str
    params: list[Tensor]  # one packed, or one for each expert
    uses: list[EngineUse]
    order: int  # number of the layer's backward; newer ones are larger
    delayed: bool
    leaves: list[Leaf] = field(default_factory=list)  # the parameters whose gradients are accumulated
    overwrites: set[int] = field(default_factory=set)  # ids of parameters whose main_grad it replaces
    # Hooks that hold other threads while the GEMM adds to `.grad`; `open()`'s caller releases them. None: another
    # thread may be adding.
    held: list[tuple[Any, Any]] | None = None

    def place(self, i: int) -> Place:
        """The name of parameter `i` in errors."""
        return self.name, None if len(self.params) == 1 else i

    def may_add(self, param: Tensor) -> bool:
        """True if the GEMM may add to `.grad` of a parameter, and AccumulateGrad need not. No other thread adds to a
        frozen parameter.
        """
        return self.held is not None or not param.requires_grad


class Home(Protocol):
    """A `destinations.Destination`, as far as `plain_gradient.py` uses it."""

    def tensors(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """See `Destination.tensors`."""


class ParameterState:
    """State of one parameter, from its first use until it is freed; does not keep the parameter alive."""

    # fmt: off
    __slots__ = ("accumulates_in", "began", "buffer", "catch", "compiled_in", "dummy", "entered",
                 "grad_is_main", "holds", "home", "lent", "overwritten_in", "queued", "ref", "replaced_by")
    # fmt: on

    def __init__(self, param: Tensor) -> None:
        # The callback is C code alone: an interrupt in Python code could leave the state to a new parameter of this id.
        self.ref = weakref.ref(param, partial(_states.pop, id(param)))
        self.holds = GRADIENT  # contents of main_grad; changed by `on` alone
        self.began = -1  # route.py: `order` of the last gradient that overwrote main_grad
        self.buffer: list[ParameterState] | None = None  # states of all parameters of its MainGradBuffer
        self.grad_is_main = False  # lending.py: `.grad` is `main_grad`, or None, which says that a step has begun
        self.lent: Lent | None = None  # lending.py
        self.accumulates_in: torch.dtype | None = None  # lending.py: the dtype of `.grad`; None: its own
        self.overwritten_in: Backward | None = None  # with `overwrite_main_grad`: the last backward that overwrote
        self.queued: weakref.WeakSet[WeightGradient] | None = None  # records of gradients that wait in a queue
        self.dummy: Tensor | None = None  # dummy.py: the dummy wgrad
        self.catch: RemovableHandle | None = None  # plain_gradient.py: the handle of the hook
        self.entered = ""  # forward_checks.py: the mode of the last forward that passed all checks
        self.home: Home | None = None  # where fused gradients last went, if past `.grad`
        self.replaced_by = ""  # guard.py: what gave the model another parameter in its place
        self.compiled_in: Backward | None = None  # compiled.py: the backward whose graph adds to main_grad

    def on(self, event: Event) -> None:
        """Change what main_grad holds. A transition that the table lacks raises KeyError."""
        self.holds = TRANSITIONS[event][self.holds]

    def is_fused(self) -> bool:
        """True once a fused layer that adds to `main_grad` has used the parameter."""
        return self.home is not None and self.entered != ""


_states: dict[int, ParameterState] = {}  # by id


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
