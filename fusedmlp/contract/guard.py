"""Check before every step of every optimizer: raise if a gradient is in `main_grad` alone, or still in a queue, or if
the model has another parameter by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusedmlp.contract.dummy import has_dummy_wgrad
from fusedmlp.contract.lending import wrap_closure
from fusedmlp.contract.parameter_state import find_state, state_of
from fusedmlp.contract.states import GRADIENT, LENT, STEPPED, Event
from fusedmlp.versions import outside_of_graphs


@cache
def guard_optimizers() -> None:
    """Register the check, once; called when a buffer or a queue is made, or parameters are replaced."""
    register_optimizer_step_pre_hook(outside_of_graphs(_before))


def replaced(params: Iterable[Tensor], by: str) -> None:
    """Make steps of optimizers that have one of these parameters raise, as the model trains others in their place."""
    guard_optimizers()
    for param in params:
        state_of(param).replaced_by = by


def _before(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    _check(optimizer)
    return wrap_closure(args, kwargs, partial(_around, optimizer))


def _around(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    result = closure()
    _check(optimizer)
    return result


def _check(optimizer: Optimizer) -> None:
    """Raise if the step would miss a gradient; mark the gradients that it uses. Reads nothing on the device."""
    states = [
        (f"param_groups[{i}]['params'][{j}]", param, state)
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
        if (state := find_state(param)) is not None
    ]
    for place, param, state in states:
        step = f"{type(optimizer).__name__}.step(): {place}"
        if state.replaced_by:
            raise RuntimeError(
                f"{step}: expected a parameter of the model; got one that {state.replaced_by} replaced: make the "
                "optimizer after that"
            )
        if state.queued:
            raise RuntimeError(
                f"{step}: expected every gradient to be computed; got one that is still in a WgradQueue: call "
                "backward_dw(), or queue.run(), before (queue.clear() to discard the step)"
            )
        lent = state.grad_is_main or state.lent is not None
        if has_dummy_wgrad(param) or (
            state.buffer is not None and state.holds in (GRADIENT, LENT, STEPPED) and not lent
        ):
            raise RuntimeError(
                f"{step}: expected its gradient in .grad; got one that is in main_grad, with "
                f"{'a zero dummy' if param.grad is not None else 'nothing'} in .grad: step inside of "
                "buffer.as_grad(), or make the buffer with MainGradBuffer(params, optimizer=optimizer)"
            )
    for _, param, state in states:
        if state.buffer is not None and param.grad is not None and (state.grad_is_main or state.lent is not None):
            state.on(Event.STEP)
