"""The catch: a tensor hook on parameters whose plain gradients PyTorch must not simply add to `.grad`.

An owner of `main_grad` that sees `grad_added_to_main_grad` drops `.grad`, and with it a plain gradient of the same
step. So the hook adds the plain gradient to `main_grad` itself and leaves zeros in `.grad`. For `FP32Accumulation` it
makes PyTorch add to a float32 `.grad`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from fusedmlp.contract import engine
from fusedmlp.contract.checks import label, refuse_tensor_hooks
from fusedmlp.contract.dummy import has_dummy_wgrad, remove_dummy_wgrad
from fusedmlp.contract.overwrite import asks, refuse_compiled_writer, refuse_to_be_erased
from fusedmlp.contract.parameter_state import ParameterState, Place, accumulation_lock
from fusedmlp.contract.steps import restore
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
    in_grad = state.accumulates_in is not None
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
        restore(param, state)
        if param.grad is None:
            like = grad if grad.is_sparse else param  # as SparseAdam expects
            param.grad = torch.zeros_like(like, dtype=state.accumulates_in)
        return None


def _take(param: Tensor, state: ParameterState, grad: Tensor) -> Tensor | None:
    """Add `grad` to `main_grad` and return zeros for `.grad`; or return None: the owner adds `.grad` to `main_grad`."""
    (main_grad,) = [None] if state.home is None else state.home.tensors([param])
    if main_grad is None:
        return None
    if asks(param):
        raise _erased(("a parameter", None))
    if _owner_adds(param) or not param.grad_added_to_main_grad:  # type: ignore[attr-defined]
        remove_dummy_wgrad(param)
        return None
    if state.catch is None or next(reversed([*(param._backward_hooks or ())]), None) != state.catch.id:
        refuse_tensor_hooks(param, ("a parameter", None))  # a hook that runs after this one would see zeros
    engine.current_backward().join_stream(main_grad)
    refuse_compiled_writer(state, ("a parameter", None))
    refuse_to_be_erased(param, engine.current_backward(), ("a parameter", None))
    main_grad.add_(grad)
    remove_dummy_wgrad(param)
    return torch.zeros_like(param, dtype=grad.dtype, requires_grad=False)


def _owner_adds(param: Tensor) -> bool:
    """Tell whether the owner adds `.grad` to `main_grad`, whatever the flag says."""
    return getattr(param, "zero_out_wgrad", False)


def _erased(place: Place) -> RuntimeError:
    return RuntimeError(
        f"{label(place)} with overwrite_main_grad: expected use by fusedmlp layers only; got use by plain PyTorch, "
        "whose gradient one of a layer would erase"
    )


def refuse_earlier_plain_gradient(param: Tensor, state: ParameterState, place: Place) -> None:
    """Raise for a plain gradient that came before any catch, if the first fused one erases what is in `main_grad`."""
    if state.dummy is not None or not asks(param) or param.grad is None or _owner_adds(param):
        return
    if getattr(param, "grad_added_to_main_grad", True) or 0 in param.grad.stride():  # a dummy, in a CUDA graph
        return
    raise _erased(place)


def adopt_plain_gradient(param: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Before the first fused gradient of a step: add an earlier plain one, `.grad`, to `main_grad`.

    Otherwise the owner, which sees the flag, would drop it.
    """
    if has_dummy_wgrad(param) or _owner_adds(param) or asks(param):
        return
    engine.current_backward().join_stream(main_grad)
    with torch.no_grad():
        main_grad.add_(grad)
    param.grad = None
