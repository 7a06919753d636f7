"""State of a parameter that the contract keeps from one call to the next, and the lock held while it changes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

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


class Holds(Enum):
    """Contents of a `main_grad`, as far as this library knows."""

    GRADIENT = "the gradient of this step; without a MainGradBuffer, whatever its owner has put there"
    ZEROS = "zeros, or what was written to it by hand: the next gradient adds"
    LENT = "ZEROS, or what plain PyTorch added to it inside as_grad"
    STEPPED = "a gradient from which an optimizer has stepped: the next gradient adds, unless a step begins first"
    STALE = "the gradient of an earlier step: the next gradient overwrites it"
    UNSURE = "a gradient of this step, or STALE: a forward under no_grad had is_first_microbatch=True"


GRADIENT, ZEROS, LENT, STEPPED, STALE, UNSURE = Holds  # looked up once, not for every parameter


class Lent(NamedTuple):
    """A gradient in the dtype of its parameter, lent to an optimizer or inside `as_grad`."""

    rounded: Tensor  # `.grad` meanwhile
    version: int  # of `rounded` when it was lent: a larger one shows that it was edited
    exact: Tensor  # `rounded` is a copy of it
    takes_gradients: bool  # whether a backward meanwhile reclaims the exact tensor; otherwise it raises


@dataclass(eq=False)
class Queued:
    """Record of a queued gradient; later gradients of the same `main_grad` are checked against it."""

    params: list[Tensor]
    overwrites: list[bool]  # per parameter: replaces what main_grad holds
    order: int  # number of the layer's backward; newer ones are larger

    def overwrites_param(self, param: Tensor) -> bool:
        """Whether it replaces what this parameter's main_grad holds."""
        if True not in self.overwrites:  # as nearly always
            return False
        return any(p is param and overwrites for p, overwrites in zip(self.params, self.overwrites, strict=True))


class WeightCopy(NamedTuple):
    """A copy of a weight, and of those of other experts, that is kept for the micro-batches of a step."""

    format: torch.dtype | str  # a dtype or an 8-bit recipe
    of: tuple[tuple[int, int], ...]  # address and version of each of the weights when it was made
    tensors: list[Tensor]


class ParameterState:
    """State of one parameter, from its first use until it is freed; does not keep the parameter alive."""

    # fmt: off
    __slots__ = ("began", "buffer", "catch", "compiled_in", "copy", "dummy", "entered", "fsdp2", "grad_is_main",
                 "holds", "lent", "overwritten_in", "plain", "queued", "ref", "replaced_by")
    # fmt: on

    def __init__(self, param: Tensor) -> None:
        # The callback is C code alone: an interrupt in Python code could leave the state to a new parameter of this id.
        self.ref = weakref.ref(param, partial(_states.pop, id(param)))
        self.holds = GRADIENT  # overwrite.py: contents of main_grad
        self.began = -1  # route.py: `order` of the last gradient that overwrote main_grad
        self.plain: Tensor | None = None  # the sum of plain gradients that arrived while `holds` was UNSURE
        self.buffer: list[ParameterState] | None = None  # states of all parameters of its MainGradBuffer
        self.grad_is_main = False  # lending.py: `.grad` is `main_grad`, or None, which says that a step has begun
        self.lent: Lent | None = None  # lending.py
        self.overwritten_in: Backward | None = None  # with `overwrite_main_grad`: the last backward that overwrote
        self.queued: weakref.WeakSet[Queued] | None = None  # records of gradients that wait in a queue
        self.dummy: Tensor | None = None  # dummy.py: the dummy wgrad
        self.catch: RemovableHandle | None = None  # plain_gradient.py: the handle of the hook
        self.entered = ""  # forward_checks.py: the mode of the last forward that passed all checks
        self.fsdp2: bool | None = None  # reducers.py: whether FSDP2 owns the parameter; None: not looked up yet
        self.copy: WeightCopy | None = None  # autograd/weight_copies.py
        self.replaced_by = ""  # guard.py: what gave the model another parameter in its place
        self.compiled_in: Backward | None = None  # compiled.py: the backward whose graph adds to main_grad

    def is_fused(self) -> bool:
        """True once a fused layer that adds to `main_grad` has used the parameter."""
        return self.entered in ("auto", "main_grad")


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
