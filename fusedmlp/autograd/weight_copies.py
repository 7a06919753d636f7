"""Copies of weights in the format that GEMMs take: float32 weights in 16 bits, and any weights in 8 bits.

A copy is made for one call, or kept for the micro-batches of a step. Address and version of a weight show most changes
of it, but not those through `.data`, nor a new gather of FSDP2 or ZeRO-3 at the same address: only a caller that knows
when a step begins may keep copies, and `forget` drops them then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedmlp.contract.parameter_state import WeightCopy, find_state, state_of
from fusedmlp.operators import ops


def computed(weights: list[Tensor], dtype: torch.dtype, keep: bool) -> list[Tensor]:
    """The weights themselves if they have this dtype, else a copy of them, `[E, ...]`.

    Args:
        weights: one packed tensor, or one for each expert.
        dtype: that the layer computes in.
        keep: return the copy that an earlier call kept, or make one and keep it until `forget`.
    """
    if weights[0].dtype == dtype:
        return weights
    if keep and (kept := _kept(weights, dtype, lambda: [_copy(weights, dtype)])):
        return kept
    return [_copy(weights, dtype)]


def quantized(weights: list[Tensor], logical: list[Tensor], recipe: str, impl: str) -> list[Tensor]:
    """The kept copies of `ops.quantize_weights`; empty if none can be kept, as inside a graph. `logical`: `[out, in]`
    views of the weights.
    """
    return _kept(weights, recipe, lambda: quantize(logical, recipe, impl)) or []


def quantize(logical: Sequence[Tensor], recipe: str, impl: str) -> list[Tensor]:
    """Elements and scales for products over in features, then those for products over out features."""
    with torch.no_grad():
        return [*ops.quantize_weights([*logical], recipe, impl)]


def forget(weights: Sequence[Tensor]) -> None:
    """Drop the copy that is kept of weights, as a step begins, and their values may have changed."""
    state = find_state(weights[0])
    if state is not None:
        state.copy = None


def origin(weights: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Address and version of each weight: they tell a copy's weights from others, and from what these become."""
    return tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)


def _kept(weights: list[Tensor], format: torch.dtype | str, make: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    """The kept copy in this format, made if there is none; None if none can be kept."""
    if torch.compiler.is_compiling() or any(w.is_inference() or not w.is_leaf for w in weights):
        return None
    of = origin(weights)
    state = state_of(weights[0])
    kept = state.copy
    if kept is None or kept.of != of or kept.format != format:
        kept = state.copy = WeightCopy(format, of, make())
    return kept.tensors


def _copy(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    if len(weights) == 1:
        return weights[0].to(dtype)
    if torch.compiler.is_compiling():
        return torch.stack([w.to(dtype) for w in weights])
    packed = weights[0].new_empty(len(weights), *weights[0].shape, dtype=dtype)
    torch._foreach_copy_(list(packed.unbind()), [w.detach() for w in weights])  # one launch
    return packed
