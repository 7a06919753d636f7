"""The dummy wgrad: a zero gradient in `.grad` of a fused parameter, for owners with hooks that expect a gradient.

It is one zero, expanded to the shape of the parameter: it costs neither memory nor a kernel, and refuses most writes.
Every parameter has its own, so that a write which PyTorch allows changes no other parameter's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmlp.contract.checks import grad_dtype
from fusedmlp.contract.parameter_state import ParameterState, find_state, state_of


def set_dummy_wgrad(param: Tensor, state: ParameterState) -> None:
    """Set `.grad` to a zero gradient if it is None."""
    if param.grad is not None:
        return
    dummy = state.dummy
    # Replace a dummy that was written to, or given other memory (`.grad.data = ...`, `module.to(...)`).
    if dummy is None or dummy._version or dummy.stride()[0]:
        dummy = _new_dummy(param)
    try:
        param.grad = dummy
    except RuntimeError:  # the parameter's dtype or device has changed
        param.grad = _new_dummy(param)


def remove_dummy_wgrad(param: Tensor) -> None:
    """Set `.grad` to None if it is the expanded zero, before something adds to it."""
    if _has_expanded_zero(param):
        param.grad = None


def has_dummy_wgrad(param: Tensor) -> bool:
    """Whether `.grad` is the expanded zero that was put there, and has not been written to."""
    return _has_expanded_zero(param) and param.grad._version == 0  # type: ignore[union-attr]


def _has_expanded_zero(param: Tensor) -> bool:
    state = find_state(param)
    return state is not None and state.dummy is not None and param.grad is state.dummy and not state.dummy.stride(0)


def _new_dummy(param: Tensor) -> Tensor:
    dtype = grad_dtype(param)
    if param.numel() <= 1:  # an expanded scalar of one element would be writable
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    with torch.inference_mode(False):  # inference tensors do not count writes
        dummy = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
    # Memory allocated while a CUDA graph is captured is the graph's, and zero only after a replay: do not keep it.
    if not (param.is_cuda and torch.cuda.is_current_stream_capturing()):
        state_of(param).dummy = dummy
    return dummy
