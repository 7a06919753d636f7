"""The dummy wgrad: a zero gradient in `.grad` of a fused parameter, for owners whose hooks want one.

It is one zero, expanded: it costs neither memory nor a kernel, and refuses most writes. Every parameter has its own, so
that a write which PyTorch lets through reaches no other's. `FUSEDMLP_DENSE_DUMMY=1` makes it dense, and anew each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmlp.contract.destination import grad_dtype
from fusedmlp.contract.parameter_state import ParameterState, find_state, state_of


def set_dummy_wgrad(param: Tensor, state: ParameterState, dense: bool) -> None:
    """See that `.grad` is not None: a zero gradient, if there is none. `dense`: `environment.dense_dummy()`."""
    if param.grad is not None:
        return
    dummy = state.dummy
    # Written to, or given other memory (`.grad.data = ...`, `module.to(...)`).
    if dense or dummy is None or dummy._version or dummy.stride()[0]:
        dummy = _new_dummy(param, dense)
    try:
        param.grad = dummy
    except RuntimeError:  # the parameter has another dtype or device since
        param.grad = _new_dummy(param, dense)


def remove_dummy_wgrad(param: Tensor) -> None:
    """See that PyTorch, or whoever adds to `.grad`, does not meet the expanded zero."""
    if _has_own(param):
        param.grad = None


def has_dummy_wgrad(param: Tensor) -> bool:
    """Whether `.grad` is the expanded zero that was put there, and nobody wrote to it."""
    return _has_own(param) and param.grad._version == 0  # type: ignore[union-attr]


def _has_own(param: Tensor) -> bool:
    state = find_state(param)
    return state is not None and state.dummy is not None and param.grad is state.dummy and not state.dummy.stride(0)


def _new_dummy(param: Tensor, dense: bool) -> Tensor:
    dtype = grad_dtype(param)
    if dense or param.numel() <= 1:  # an expanded scalar of one element would be writable
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    with torch.inference_mode(False):  # whose tensors count no writes
        dummy = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
    # While a CUDA graph is captured, memory belongs to the graph, and holds zero only once that is replayed.
    if not (param.is_cuda and torch.cuda.is_current_stream_capturing()):
        state_of(param).dummy = dummy
    return dummy
