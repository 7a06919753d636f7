"""The `repr` of a `MainGradBuffer`, from the states of its parameters: reads nothing on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedmlp.contract.overwrite import is_stale
from fusedmlp.contract.parameter_state import ParameterState
from fusedmlp.contract.states import STEPPED, ZEROS


def size(params: Sequence[Tensor], states: Sequence[ParameterState], flat: Tensor) -> str:
    """Sizes, and the share of elements in parameters that fused layers use."""
    elements = sum(param.numel() for param in params)
    fused = sum(param.numel() for param, state in zip(params, states, strict=True) if state.is_fused())
    return (
        f"{len(params)} parameters, {elements} elements, {flat.nbytes} bytes of {flat.dtype} on {flat.device}, "
        f"fused {fused / max(elements, 1):.0%}"
    )


def step(params: Sequence[Tensor], states: Sequence[ParameterState]) -> str:
    """The state of the step."""
    if any(state.buffer is not states for state in states):
        return "detached"
    queued = sum(bool(state.queued) for state in states)
    if queued:
        return f"{queued} gradients in a WgradQueue"
    pairs = [*zip(params, states, strict=True)]
    if any(state.holds is STEPPED and not is_stale(param, state) for param, state in pairs):
        return "an optimizer has stepped"
    have = sum(
        not is_stale(param, state) and (state.holds is not ZEROS or param.grad is not None) for param, state in pairs
    )
    return f"gradients of {have} parameters" if have else "no gradient yet"
