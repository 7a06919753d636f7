"""Decides which gradient overwrites `main_grad` instead of adding: the first to arrive in a step, or in a backward.

A step begins with `MainGradBuffer.zero_()` or, where `.grad` is `main_grad`, with `zero_grad()`. The first gradient to
arrive after that overwrites, whichever micro-batch it is of. Every later one adds: of a tied weight, of a second
backward through one graph, of a checkpoint inside the backward.

`param.overwrite_main_grad` says that the owner gives the parameter a new `main_grad` for every backward. An owner that
does so several times in a backward clears `grad_added_to_main_grad` each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.checks import label
from fusedmlp.contract.dummy import has_dummy_wgrad
from fusedmlp.contract.lending import reclaim
from fusedmlp.contract.parameter_state import ParameterState, Place, WeightGradient, state_of
from fusedmlp.contract.states import STALE, Event


def begin_step(states: Sequence[ParameterState]) -> None:
    """Mark the gradients of some parameters stale, in `main_grad` and in `.grad`; moves no memory.

    Raises:
        RuntimeError: a gradient of one of them is still in a `WgradQueue`.
    """
    refuse_queued(states, "a new step")
    for state in states:
        param = state.ref()
        if param is not None:
            mark_stale(param, state)


def mark_stale(param: Tensor, state: ParameterState) -> None:
    """Drop the gradient of a parameter, so that the next one overwrites."""
    param.grad = state.lent = None
    state.on(Event.ZERO)
    if hasattr(param, "grad_added_to_main_grad"):
        param.grad_added_to_main_grad = False


def is_stale(param: Tensor, state: ParameterState) -> bool:
    """Whether `main_grad` holds nothing of this step."""
    return param.grad is None if state.grad_is_main else state.holds is STALE


def refuse_queued(states: Sequence[ParameterState], what: str) -> None:
    """Raise if a gradient of these parameters is still in a queue, as it would come too late."""
    for i, state in enumerate(states):
        if state.queued:
            raise RuntimeError(
                f"{what}: expected every gradient to be computed; got one of params[{i}] that is still in a "
                "WgradQueue: call backward_dw(), or queue.run(), before (queue.clear() to discard the step)"
            )


def takes_overwrite(param: Tensor, state: ParameterState) -> bool:
    """Decide whether the current gradient overwrites main_grad, and note that the next one adds."""
    if getattr(param, "overwrite_main_grad", False):
        return takes_overwrite_of_backward(param, state)
    stale = state.holds is STALE
    state.on(Event.WRITE)
    return reclaim(param, state) if state.grad_is_main or state.lent is not None else stale


def takes_overwrite_of_backward(param: Tensor, state: ParameterState) -> bool:
    """`takes_overwrite` with `overwrite_main_grad`: yes for a backward's first gradient, or if the flag was cleared."""
    state.on(Event.WRITE)  # if a step has begun, this is its first gradient
    last, state.overwritten_in = state.overwritten_in, engine.current_backward()
    flag_cleared = not getattr(param, "grad_added_to_main_grad", True)
    if flag_cleared:
        param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return flag_cleared or last is not state.overwritten_in


def adopt_plain_gradient(
    param: Tensor, state: ParameterState, grad: Tensor, main_grad: Tensor, *, overwrites: bool
) -> bool:
    """Before the first fused gradient of a step: move an earlier plain gradient, `.grad`, to `main_grad`.

    Otherwise the owner, which sees the flag, would drop it. Returns whether there was one: the fused gradient then
    does not overwrite `main_grad`.
    """
    if (
        has_dummy_wgrad(param)
        or state.grad_is_main
        or getattr(param, "zero_out_wgrad", False)  # its owner adds `.grad`, whatever the flag says
        or getattr(param, "overwrite_main_grad", False)
    ):
        return False
    engine.current_backward().join_stream(main_grad)
    with torch.no_grad():
        main_grad.copy_(grad) if overwrites else main_grad.add_(grad)
    param.grad = None
    return True


def give_back_overwrite(param: Tensor) -> None:
    """Undo `takes_overwrite` for a gradient that failed: the next one overwrites instead."""
    state = state_of(param)
    state.overwritten_in = None
    if state.grad_is_main:
        param.grad = None
    elif not getattr(param, "overwrite_main_grad", False):
        state.on(Event.FAIL)


def refuse_other_writers(param: Tensor, state: ParameterState, place: Place, *current: WeightGradient) -> None:
    """Raise if the current gradient would be lost because something else writes to the same main_grad, or is of a step
    that is over.

    Such a writer is a gradient in a queue that is going to overwrite, or a compiled graph in another backward, which
    holds no lock. `current`: the records, in order, of the gradients that the GEMM adds together; queued gradients that
    are newer than the last one do not matter.
    """
    if current and state.buffer is None and current[0].order < state.began and id(param) not in current[0].overwrites:
        raise RuntimeError(
            f"{label(place)}: expected gradients of the backward that overwrote main_grad, or of later ones; got one "
            "of an earlier backward, which was never run: call queue.clear() to discard it"
        )
    older = [r for r in queued_overwrites(param, state) if not current or r.order < current[-1].order]
    if any(record not in current for record in older):
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


def queued_overwrites(param: Tensor, state: ParameterState) -> list[WeightGradient]:
    """Records of the queued gradients of a parameter that are going to overwrite its main_grad."""
    return [route for route in state.queued or () if id(param) in route.overwrites]
