"""Forward: raise early for gradients that backward could not write, register what backward needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from types import ModuleType

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.checks import label, refuse_late_hooks
from fusedmlp.contract.group import group_of
from fusedmlp.contract.memory import lent
from fusedmlp.contract.owners.refusal import present_owners, refuse_owner
from fusedmlp.contract.parameter_state import ParameterState, find_states, release_interrupted, state_of
from fusedmlp.contract.route import Mode, beside_grad

_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def enter_forward(name: str, weights: Sequence[Tensor], mode: Mode, *, delayed: bool) -> None:
    """Check one weight (a packed tensor, or one per expert); register hooks and states that its backward needs."""
    if engine.inside_functorch_transform():
        raise RuntimeError(
            "fusedmlp inside a torch.func transform (grad, vmap, jvp, ...): expected plain autograd; the transform "
            "would bypass .grad and main_grad"
        )
    if engine.inside_backward():  # a checkpoint's recomputation
        engine.nest_backwards()
    else:
        release_interrupted()
    owners = present_owners()
    if owners:
        _refuse_other_dtype(name, weights, owners)
    else:
        group = group_of(weights)
        if group is not None and not (delayed and group.has_late_hooks(weights)):
            return
        hooked = delayed and any(map(_LATE_HOOKS, weights))
        if not hooked and all(map(_has_passed, weights, find_states(weights), repeat(mode))):
            return
    of_group = beside_grad(mode, [weight for weight in weights if weight.requires_grad])
    if of_group is None and not delayed:
        return
    for i, weight in enumerate(weights):
        if not weight.requires_grad:
            continue
        place = name, None if len(weights) == 1 else i
        destination = of_group if of_group is None or mode == of_group.name or of_group.find([weight])[0] else None
        if destination is None and not delayed:
            continue
        if weight.is_leaf:
            state = state_of(weight)
            if destination is not None:
                destination.enter(weight, state)
            if not torch.is_grad_enabled():
                continue
            if owners:
                refuse_owner(weight, owners, place, "" if delayed or destination is None else destination.name)
            if delayed:
                refuse_late_hooks(weight, place)
            if destination is not None and mode == destination.name:
                destination.refuse(weight, place)
            state.entered = mode
        elif destination is not None and torch.is_grad_enabled():
            raise RuntimeError(
                f"{label(place)}: accumulate_wgrad={mode!r} needs a leaf parameter; got the result of "
                f"{weight.grad_fn}, through which only a returned gradient flows back: use accumulate_wgrad='off'"
            )


def _refuse_other_dtype(name: str, weights: Sequence[Tensor], owners: Sequence[ModuleType]) -> None:
    """Raise for a buffer in another dtype than its weights, with which DDP fails in the middle of a backward."""
    for i, (weight, memory) in enumerate(zip(weights, lent(weights), strict=True)):
        if memory is not None and memory.dtype != weight.dtype and any(owner.owns(weight) for owner in owners):
            raise RuntimeError(
                f"{label((name, None if len(weights) == 1 else i))}: expected MainGradBuffer(..., "
                f"dtype={weight.dtype}) for a parameter whose .grad is reduced in that dtype; got a buffer in "
                f"{memory.dtype}"
            )


def _has_passed(weight: Tensor, state: ParameterState | None, mode: Mode) -> bool:
    """Whether an earlier forward in this mode passed all checks; backward repeats checks if their result can change."""
    if state is None or state.entered != mode or not weight.is_leaf:
        return False
    if state.catch is None:
        return not hasattr(weight, "grad_added_to_main_grad")
    return state.catch.id in (weight._backward_hooks or ())
