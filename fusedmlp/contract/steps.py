"""Steps of optimizers: a check that no gradient is missing, and 16-bit copies of float32 gradients while they step.

Gradients of 16-bit weights accumulate in float32 (a `MainGradBuffer`, `FP32Accumulation`), with `grad_dtype` None,
which permits a `.grad` of any dtype. Optimizers expect the dtype of the weight. So while any optimizer steps, `.grad`
is a rounded copy; afterwards, and while a closure runs, it is the exact tensor again. An edited copy is copied back.
Whatever arrives restores first, so that inner steps, and steps that raised, need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fusedmlp.contract.dummy import has_dummy_wgrad
from fusedmlp.contract.parameter_state import ParameterState, find_state, ids_waiting, state_of
from fusedmlp.versions import outside_of_graphs


class Rounded(NamedTuple):
    """A rounded copy, which is `.grad` while an optimizer steps, and the exact tensor."""

    copy: Tensor
    version: int  # of `copy` when it was made: a larger one shows that it was edited
    exact: Tensor
    by: Optimizer


@cache
def watch_steps() -> None:
    """Register the hooks, once, for every optimizer; called when a buffer, a queue or a dummy is made."""
    register_optimizer_step_pre_hook(outside_of_graphs(_before))
    register_optimizer_step_post_hook(outside_of_graphs(_after))


def replaced(params: Iterable[Tensor], by: str) -> None:
    """Make steps of optimizers that have one of these parameters raise, as the model trains others in their place."""
    watch_steps()
    for param in params:
        state_of(param).replaced_by = by


def restore(param: Tensor, state: ParameterState) -> None:
    """Make `.grad` the exact tensor again, if it is a rounded copy; edits of the copy come with it.

    Under `FP32Accumulation` a tensor of another dtype that somebody has put there becomes float32.
    """
    rounded: Rounded | None = state.rounded
    state.rounded = None
    if rounded is not None and param.grad is rounded.copy:  # otherwise somebody has cleared or replaced it
        if rounded.copy._version != rounded.version:
            rounded.exact.copy_(rounded.copy)
        param.grad = rounded.exact
    if param.grad is not None and state.accumulates_in not in (None, param.grad.dtype):
        param.grad = param.grad.to(state.accumulates_in)


def _known(optimizer: Optimizer) -> list[tuple[str, Tensor, ParameterState]]:
    return [
        (f"param_groups[{i}]['params'][{j}]", param, state)
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
        if (state := find_state(param)) is not None
    ]


@torch.no_grad()
def _round(optimizer: Optimizer) -> None:
    """Check, and lend the optimizer rounded gradients."""
    known = _known(optimizer)
    queued = ids_waiting()
    for place, param, state in known:
        _check(f"{type(optimizer).__name__}.step(): {place}", param, state, id(param) in queued)
    differing = [
        (param, state, grad)
        for _, param, state in known
        if state.rounds and (grad := param.grad) is not None and grad.dtype != param.dtype
    ]
    if not differing:
        return
    _scale_to_fit(optimizer, [grad for param, _, grad in differing if param.dtype == torch.float16])
    copies = []
    for param, state, grad in differing:
        with torch.inference_mode(False):  # a step may run in inference_mode, but the copy has a version
            copy = grad.to(param.dtype)
        state.rounded = Rounded(copy, copy._version, grad, optimizer)
        param.grad = copy
        copies.append(copy)
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None:  # rounding to float16 may have overflowed
        found_inf.copy_(torch.maximum(found_inf, (~_largest(copies).isfinite()).to(found_inf)))


def _check(step: str, param: Tensor, state: ParameterState, queued: bool) -> None:
    """Raise if the step would miss a gradient. Reads nothing on the device."""
    if state.replaced_by:
        raise RuntimeError(
            f"{step}: expected a parameter of the model; got one that {state.replaced_by} replaced: make the "
            "optimizer after that"
        )
    if queued:
        raise RuntimeError(
            f"{step}: expected every gradient to be computed; got one that is still in a WgradQueue: call "
            "backward_dw(), or queue.run(), before (queue.clear() to discard the step)"
        )
    if has_dummy_wgrad(param):
        raise RuntimeError(
            f"{step}: expected its gradient in .grad; got a zero dummy, as its gradient is in main_grad: step with the "
            "optimizer of the owner of main_grad"
        )


@torch.no_grad()
def _restore(optimizer: Optimizer) -> None:
    for _, param, state in _known(optimizer):
        if state.rounded is not None and state.rounded.by is optimizer:
            restore(param, state)


def _before(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    _round(optimizer)
    around = partial(_around, optimizer)
    if len(args) > 1 and callable(args[1]):
        return (args[0], partial(around, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": partial(around, kwargs["closure"])}
    return args, kwargs


def _around(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    _restore(optimizer)
    result = closure()
    _round(optimizer)
    return result


def _after(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    _restore(optimizer)


def _scale_to_fit(optimizer: Optimizer, rounded: list[Tensor]) -> None:
    """Scale down gradients that a `GradScaler` leaves to fused optimizers until the largest one fits float16.

    They are not unscaled, as small ones would then be zero in float16. `rounded`: those that will be float16.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None or not rounded:
        return
    largest = _largest(rounded).to(scale)
    factor = (torch.finfo(torch.float16).max / largest).log2().floor().exp2().clamp(max=1)  # 1 if all are zero
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))
    optimizer.grad_scale = scale * factor  # type: ignore[attr-defined]


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute value in tensors on one or more devices; NaN if there is one."""
    norms = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()] or [torch.zeros(1)], math.inf)
    return torch.stack([norm.float().to(norms[0].device) for norm in norms]).amax()
