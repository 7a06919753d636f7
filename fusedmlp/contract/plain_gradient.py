"""The catch: what plain PyTorch makes of a parameter goes to `main_grad` too.

Where `.grad` is `main_grad`, or a rounded copy of it is lent to an optimizer, a tensor hook sees to it that autograd
adds to the exact tensor. Elsewhere an owner that sees `grad_added_to_main_grad` drops `.grad`, and with it a plain
gradient of the same step; and what is to overwrite `main_grad` later would erase one that the owner has added. So the
hook, registered once on every parameter with that attribute, adds it to `main_grad` itself and leaves zeros in `.grad`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from fusedmlp.contract import engine
from fusedmlp.contract.destination import main_grad_of, refuse_tensor_hooks
from fusedmlp.contract.dummy import has_dummy_wgrad, remove_dummy_wgrad
from fusedmlp.contract.lending import reclaim
from fusedmlp.contract.overwrite import queued_overwrites, refuse_other_writers, takes_overwrite_of_backward
from fusedmlp.contract.parameter_state import GRADIENT, STALE, UNSURE, ParameterState, accumulation_lock


def catch_plain_gradients(param: Tensor, state: ParameterState) -> None:
    """From now on; at once if that was asked for before."""
    if state.catch is None or state.catch.id not in (param._backward_hooks or ()):
        with accumulation_lock:
            if state.catch is None or state.catch.id not in (param._backward_hooks or ()):  # no other thread has
                state.catch = param.register_hook(unserializable_hook(partial(_catch, state)))


def _catch(state: ParameterState, grad: Tensor | None) -> Tensor | None:
    """`grad` is None where all that reached the parameter is fused; returns what goes on to `.grad`, if not that.

    Runs for gradients that somebody asked for too, which are none of our business.
    """
    if grad is None:
        return None
    param = state.ref()
    if param is None or not param.requires_grad:
        return None
    in_grad = state.grad_is_main or state.lent is not None or param.grad_dtype not in (None, grad.dtype)
    if not in_grad and not hasattr(param, "grad_added_to_main_grad"):
        return None
    node = engine.current_node()
    if not engine.is_leaf_node(node):  # compiled autograd's
        node = torch.autograd.graph.get_gradient_edge(param).node
    if engine.engine_use(node, node) is not engine.ACCUMULATE:
        return None
    with accumulation_lock, torch.no_grad():
        if not in_grad:
            return _take(param, state, grad)
        _leave_in_grad(param, state, grad)
        return None


def _leave_in_grad(param: Tensor, state: ParameterState, grad: Tensor) -> None:
    """Let `.grad` be the exact tensor, to which autograd adds `grad` next."""
    if state.lent is not None and not state.lent.takes_gradients:  # inside as_grad
        return
    if state.grad_is_main:
        main_grad: Tensor = main_grad_of(param)  # type: ignore[assignment]
        engine.current_backward().join_stream(main_grad)
        _refuse_queued_overwrite(param, state)
        refuse_other_writers(param, state, ("a parameter", None))
    if reclaim(param, state) and state.grad_is_main:
        main_grad.zero_()
    state.holds = GRADIENT
    if param.grad is None and param.grad_dtype not in (None, grad.dtype):
        param.grad = torch.zeros_like(param, dtype=param.grad_dtype)


def adopt_plain_gradient(param: Tensor, state: ParameterState, overwrites: bool) -> bool:
    """Before the first fused gradient of a step: move to `main_grad` what plain PyTorch has left in `.grad` before.

    Its owner would drop it, seeing the flag. Returns whether the fused gradient overwrites `main_grad` still.
    """
    if (
        has_dummy_wgrad(param)
        or state.grad_is_main
        or getattr(param, "zero_out_wgrad", False)  # its owner adds `.grad`, whatever the flag says
        or getattr(param, "overwrite_main_grad", False)
    ):
        return overwrites
    main_grad, grad = main_grad_of(param), param.grad
    assert main_grad is not None
    assert grad is not None
    engine.current_backward().join_stream(main_grad)
    with torch.no_grad():
        main_grad.copy_(grad) if overwrites else main_grad.add_(grad)
    param.grad = None
    return False


def _take(param: Tensor, state: ParameterState, grad: Tensor) -> Tensor | None:
    main_grad = main_grad_of(param)
    if main_grad is None:
        return None
    owner_adds = getattr(param, "zero_out_wgrad", False)  # Megatron's: `.grad`, whatever the flag says
    if owner_adds and getattr(param, "skip_backward_post_hook", False) and queued_overwrites(param, state):
        remove_dummy_wgrad(param)  # the owner adds after the queue
        return None
    _refuse_queued_overwrite(param, state)
    added = param.grad_added_to_main_grad  # type: ignore[attr-defined]
    each_backward = getattr(param, "overwrite_main_grad", False)
    unknown = state.holds is UNSURE and state.buffer is None and not each_backward
    overwrite = _overwrites_backward(param, state, added) if each_backward else state.holds is STALE
    if not (overwrite or unknown) and (owner_adds or not added):
        remove_dummy_wgrad(param)
        return None
    if next(reversed([*(param._backward_hooks or ())]), None) != state.catch.id:
        refuse_tensor_hooks(param, ("a parameter", None))  # a hook that runs after this one would see zeros
    if not unknown:
        state.holds = GRADIENT
    engine.current_backward().join_stream(main_grad)
    refuse_other_writers(param, state, ("a parameter", None))
    if unknown:  # the first micro-batch's gradient, from a reentrant checkpoint, may still come and overwrite
        state.plain = torch.zeros_like(main_grad) if state.plain is None else state.plain
        state.plain.add_(grad)
    main_grad.copy_(grad) if overwrite else main_grad.add_(grad)
    param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    remove_dummy_wgrad(param)
    return torch.zeros_like(param, dtype=grad.dtype, requires_grad=False)


def _refuse_queued_overwrite(param: Tensor, state: ParameterState) -> None:
    if queued_overwrites(param, state):
        raise RuntimeError(
            "a parameter is used both by a fusedmlp layer, whose queued gradient is going to overwrite main_grad, "
            "and by plain PyTorch, whose gradient it would erase; expected only the former"
        )


def _overwrites_backward(param: Tensor, state: ParameterState, added: bool) -> bool:
    """Whether a plain gradient is the first of its backward, for a parameter with `overwrite_main_grad`."""
    if not engine.is_nested(param.is_cuda):
        return takes_overwrite_of_backward(param, state)
    last = state.overwritten_in
    if last is None or last.over:
        raise RuntimeError(
            "a parameter with overwrite_main_grad is used by plain PyTorch in a reentrant checkpoint, and its "
            "gradient comes before that of a fusedmlp layer, which would erase it; expected use_reentrant=False"
        )
    return not added
