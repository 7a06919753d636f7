"""What the contract remembers of a parameter from one call to the next, and the lock held while that changes."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from fusedmlp.contract.engine import Backward
    from fusedmlp.contract.route import Route

# Held while a layer's gradients are computed and added: two threads that run backward on the CPU could otherwise add
# to one main_grad at once, and one of the sums would be lost.
accumulation_lock = threading.RLock()


def release_interrupted() -> None:
    """Let go of the lock, outside of all that holds it: an interrupt can come right where `with` ends."""
    while accumulation_lock._is_owned():  # type: ignore[attr-defined]
        accumulation_lock.release()


class ParameterState:
    """One for each parameter that a layer met, as long as the parameter lives; it keeps nothing alive."""

    # fmt: off
    __slots__ = ("catch", "checked", "compiled_in", "dummy", "fsdp2", "key", "overwritten_in", "plain", "queued",
                 "ref", "step_begins")
    # fmt: on

    def __init__(self, param: Tensor) -> None:
        self.key, self.ref = id(param), weakref.ref(param, self._forget)
        # overwrite.py: whether the next gradient overwrites main_grad. True: a forward outside of any backward said
        # so. False: one under no_grad did, in an evaluation or before a reentrant checkpoint recomputes it.
        self.step_begins: bool | None = None
        self.plain: Tensor | None = None  # the sum of plain gradients that came while that was False
        self.overwritten_in: Backward | None = None  # with `overwrite_main_grad`: the last backward that did
        self.queued: weakref.WeakSet[Route] | None = None  # its gradients that wait in a queue
        # destination.py: the main_grad that was found right last, its address and strides; the parameter's shape, dtype
        self.checked: tuple[Any, ...] = (lambda: None, 0, (), (), None)
        self.dummy: Tensor | None = None  # dummy.py: the dummy wgrad
        self.catch: Any = None  # plain_gradient.py: the handle of the hook
        self.fsdp2: bool | None = None  # forward_checks.py: whether FSDP2 gathers it, once that was asked
        self.compiled_in: Backward | None = None  # compiled.py: the backward whose graph adds to main_grad

    def _forget(self, _: object) -> None:
        if _states.get(self.key) is self:
            del _states[self.key]


_states: dict[int, ParameterState] = {}  # by id


def find_state(param: Tensor) -> ParameterState | None:
    """The state of a parameter, if it has one."""
    state = _states.get(id(param))
    return state if state is not None and state.ref() is param else None


def state_of(param: Tensor) -> ParameterState:
    """The state of a parameter; a new one makes `torch.utils.swap_tensors` refuse it, as it has a weak reference."""
    state = _states.get(id(param))
    if state is None or state.ref() is not param:
        new = ParameterState(param)
        state = _states.setdefault(id(param), new)  # another thread's, if that was faster
        if state.ref() is not param:  # of a parameter that is gone
            state = _states[id(param)] = new
    return state
