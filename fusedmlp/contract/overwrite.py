"""Which gradient overwrites `main_grad` instead of adding to it: the first to arrive of a step, or of a backward.

`is_first_microbatch=True` says that a step begins: the first gradient to arrive after that forward overwrites,
whichever micro-batch it is of. A tied weight, a second backward through one graph, a checkpoint inside the backward all
add. `param.overwrite_main_grad` says that the owner hands the parameter a new `main_grad` for every backward, or more
often, and then clears `grad_added_to_main_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.destination import Mode, Place, has_main_grad, label, main_grad_of
from fusedmlp.contract.parameter_state import ParameterState, find_state, state_of

if TYPE_CHECKING:
    from fusedmlp.contract.route import Route


def expect_overwrite(weights: Sequence[Tensor], mode: Mode) -> None:
    """After a forward of the first micro-batch that succeeded: the next gradient of its weights overwrites."""
    for weight in weights:
        if weight.requires_grad and (mode == "main_grad" or (mode == "auto" and has_main_grad(weight))):
            state = state_of(weight)
            state.step_begins, state.plain = torch.is_grad_enabled() or bool(state.step_begins), None


def forget_overwrite(param: Tensor) -> None:
    """Its `main_grad` has been zeroed."""
    state = find_state(param)
    if state is not None:
        state.step_begins = state.plain = None


def takes_overwrite(param: Tensor, state: ParameterState, place: Place, recomputes_first_microbatch: bool) -> bool:
    """Whether the gradient at hand replaces what main_grad holds; the next one then does not."""
    if getattr(param, "overwrite_main_grad", False):
        return takes_overwrite_of_backward(param, state)
    if state.step_begins is None:
        return False
    if not state.step_begins and not recomputes_first_microbatch:
        raise RuntimeError(
            f"{label(place)}: a forward under torch.no_grad() had is_first_microbatch=True, and now a gradient "
            "of another micro-batch comes; expected the first one's, from a reentrant checkpoint around it (leave "
            "is_first_microbatch out of evaluation; use_reentrant=False allows any order)"
        )
    state.step_begins = None
    if state.plain is None:
        return True
    engine.current_backward().join_stream(state.plain)
    main_grad_of(param).copy_(state.plain)  # type: ignore[union-attr]
    state.plain = None
    return False


def takes_overwrite_of_backward(param: Tensor, state: ParameterState) -> bool:
    """The same for a parameter with `overwrite_main_grad`."""
    state.step_begins = None  # a step began too, and this is its first gradient
    last, state.overwritten_in = state.overwritten_in, engine.current_backward()
    flag_cleared = not getattr(param, "grad_added_to_main_grad", True)
    if flag_cleared:
        param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return flag_cleared or last is not state.overwritten_in


def give_back_overwrite(param: Tensor) -> None:
    """The gradient that was to overwrite did not arrive: the next one does."""
    state = state_of(param)
    state.overwritten_in = None
    if not getattr(param, "overwrite_main_grad", False):
        state.step_begins = True


def refuse_other_writers(param: Tensor, state: ParameterState, place: Place, *own: Route) -> None:
    """Raise for a gradient that would be lost, as something else is going to write to its main_grad, or is doing so.

    Of those in a queue, an older one that overwrites; `own` are those that the gradient at hand is computed from. Of
    compiled graphs, whose backwards hold no lock, any in another backward.
    """
    if any(route not in own and (not own or route.order < own[-1].order) for route in queued_overwrites(param, state)):
        raise RuntimeError(
            f"{label(place)}: a queued gradient is going to overwrite main_grad, and would erase this one, "
            "which came later; run its queue first"
        )
    other = state.compiled_in
    if other is not None and not other.over and not (engine.inside_backward() and other is engine.current_backward()):
        raise RuntimeError(
            f"{label(place)}: a compiled backward in another thread is adding to this main_grad, and one of the "
            "sums would be lost; expected one backward after the other, or the layer outside of torch.compile"
        )


def queued_overwrites(param: Tensor, state: ParameterState) -> list[Route]:
    """The gradients in a queue that are going to overwrite main_grad."""
    return [route for route in state.queued or () if route.overwrites_param(param)]
