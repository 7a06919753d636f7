"""The catch: a tensor hook by which gradients that plain PyTorch computes for a parameter reach `main_grad` too.

Where `.grad` is `main_grad`, or a rounded copy of it is lent to an optimizer, the hook makes autograd add to the exact
tensor. Elsewhere an owner that sees `grad_added_to_main_grad` drops `.grad`, and with it a plain gradient of the same
step; and if the owner does add a plain gradient, a fused one that overwrites `main_grad` later erases it. So the hook,
registered once on every parameter with that attribute, adds the plain gradient to `main_grad` itself and leaves zeros
in `.grad`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from fusedmlp.contract import engine
from fusedmlp.contract.checks import refuse_tensor_hooks
from fusedmlp.contract.dummy import remove_dummy_wgrad
from fusedmlp.contract.lending import reclaim
from fusedmlp.contract.overwrite import queued_overwrites, refuse_other_writers, takes_overwrite_of_backward
from fusedmlp.contract.parameter_state import ParameterState, accumulation_lock
from fusedmlp.contract.states import STALE, Event
from fusedmlp.versions import outside_of_wrong_graphs


def catch_plain_gradients(param: Tensor, state: ParameterState) -> None:
    """Register the hook on a parameter, unless it is there."""
    if state.catch is None or state.catch.id not in (param._backward_hooks or ()):
        with accumulation_lock:
            if state.catch is None or state.catch.id not in (param._backward_hooks or ()):  # no other thread has
                state.catch = param.register_hook(unserializable_hook(partial(_catch, state)))


@outside_of_wrong_graphs
def _catch(state: ParameterState, grad: Tensor | None) -> Tensor | None:
    """The hook. `grad` is None if only fused gradients reached the parameter.

    Returns the gradient that goes on to `.grad` in the place of `grad`, or None for `grad` itself. Also runs for
    captured gradients (`torch.autograd.grad`), which it leaves alone.
    """
    if grad is None:
        return None
    param = state.ref()
    if param is None or not param.requires_grad:
        return None
    in_grad = state.grad_is_main or state.lent is not None or state.accumulates_in is not None
    if not in_grad and not hasattr(param, "grad_added_to_main_grad"):
        return None
    node = engine.current_node()
    if not engine.is_leaf_node(node):  # under compiled autograd
        node = torch.autograd.graph.get_gradient_edge(param).node
    if engine.engine_use(node, node) is not engine.ACCUMULATE:
        return None
    with accumulation_lock, torch.no_grad():
        if not in_grad:
            return _take(param, state, grad)
        _leave_in_grad(param, state, grad)
        return None


def _leave_in_grad(param: Tensor, state: ParameterState, grad: Tensor) -> None:
    """Set `.grad` to the exact tensor, to which autograd then adds `grad`."""
    if state.lent is not None and not state.lent.takes_gradients:  # inside as_grad
        return
    if state.grad_is_main:
        main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
        engine.current_backward().join_stream(main_grad)
        _refuse_queued_overwrite(param, state)
        refuse_other_writers(param, state, ("a parameter", None))
    if reclaim(param, state) and state.grad_is_main:
        main_grad.zero_()
    state.on(Event.CATCH)
    if param.grad is None and state.accumulates_in not in (None, grad.dtype):
        like = grad if grad.is_sparse else param  # as SparseAdam expects
        param.grad = torch.zeros_like(like, dtype=state.accumulates_in)


def _take(param: Tensor, state: ParameterState, grad: Tensor) -> Tensor | None:
    """Add `grad` to `main_grad` and return zeros for `.grad`; or return None: the owner adds `.grad` to `main_grad`."""
    (main_grad,) = [None] if state.home is None else state.home.tensors([param])
    if main_grad is None:
        return None
    owner_adds = getattr(param, "zero_out_wgrad", False)  # the owner then adds `.grad`, whatever the flag says
    if owner_adds and getattr(param, "skip_backward_post_hook", False) and queued_overwrites(param, state):
        remove_dummy_wgrad(param)  # the owner adds after the queue
        return None
    _refuse_queued_overwrite(param, state)
    added = param.grad_added_to_main_grad  # type: ignore[attr-defined]
    each_backward = getattr(param, "overwrite_main_grad", False)
    overwrite = _overwrites_backward(param, state, added) if each_backward else state.holds is STALE
    if not overwrite and (owner_adds or not added):
        remove_dummy_wgrad(param)
        return None
    if state.catch is None or next(reversed([*(param._backward_hooks or ())]), None) != state.catch.id:
        refuse_tensor_hooks(param, ("a parameter", None))  # a hook that runs after this one would see zeros
    state.on(Event.CATCH)
    engine.current_backward().join_stream(main_grad)
    refuse_other_writers(param, state, ("a parameter", None))
    main_grad.copy_(grad) if overwrite else main_grad.add_(grad)
    param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    remove_dummy_wgrad(param)
    return torch.zeros_like(param, dtype=grad.dtype, requires_grad=False)


def _refuse_queued_overwrite(param: Tensor, state: ParameterState) -> None:
    if queued_overwrites(param, state):
        raise RuntimeError(
            "a parameter is used both by a fusedmlp layer, whose queued gradient is going to overwrite main_grad, "
            "and by plain PyTorch, whose gradient it would erase; expected use by fusedmlp layers only"
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
