"""Checks in forward: raise early for gradients that backward could not write, and register what backward needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.destination import (
    Mode,
    existing_main_grad,
    has_main_grad,
    label,
    refuse_late_hooks,
    refuse_tensor_hooks,
)
from fusedmlp.contract.parameter_state import ParameterState, find_states, release_interrupted, state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients
from fusedmlp.contract.reducers import find_reducers, refuse_reducer

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
    reducers = find_reducers()
    may_skip = reducers is None and not (delayed and any(map(_LATE_HOOKS, weights)))
    if may_skip and all(map(_has_passed, weights, find_states(weights), repeat(mode))):
        return
    for i, weight in enumerate(weights):
        if not weight.requires_grad:
            continue
        place = name, None if len(weights) == 1 else i
        to_main_grad = mode == "main_grad" or (mode == "auto" and has_main_grad(weight))
        if (to_main_grad or delayed) and weight.is_leaf:
            state = state_of(weight)
            if to_main_grad and hasattr(weight, "grad_added_to_main_grad"):
                catch_plain_gradients(weight, state)
            if not torch.is_grad_enabled():
                continue
            if reducers:
                refuse_reducer(weight, state, reducers, place, delayed)
            if delayed:
                refuse_late_hooks(weight, place)
            if mode == "main_grad" and not hasattr(weight, "__fsdp_param__"):  # asking Megatron-FSDP would allocate
                refuse_tensor_hooks(weight, place)
                existing_main_grad(weight, place)
            state.entered = mode
        elif to_main_grad and torch.is_grad_enabled() and not weight.is_leaf:
            raise RuntimeError(
                f"{label(place)}: accumulate_wgrad={mode!r} needs a leaf parameter; got the result of "
                f"{weight.grad_fn}, through which only a returned gradient flows back: use accumulate_wgrad='off'"
            )


def _has_passed(weight: Tensor, state: ParameterState | None, mode: Mode) -> bool:
    """Whether an earlier forward in this mode passed all checks; backward repeats checks if their result can change."""
    if state is None or state.entered != mode or not weight.is_leaf:
        return False
    if state.catch is None:
        return not hasattr(weight, "grad_added_to_main_grad")
    return state.catch.id in (weight._backward_hooks or ())
