"""Copies of float32 weights in the 16 bits that a layer computes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmlp.contract.parameter_state import find_state, state_of


class WeightCopy(NamedTuple):
    """A copy that is kept for the micro-batches of a step."""

    packed: Tensor
    of: tuple[tuple[int, int], ...]  # address and version of each weight that it is a copy of


def computed(weights: list[Tensor], dtype: torch.dtype, keep: bool) -> list[Tensor]:
    """The weights themselves if they have this dtype, else a copy of them, `[E, ...]`.

    Args:
        weights: one packed tensor, or one for each expert.
        dtype: that the layer computes in.
        keep: return the copy that an earlier call kept, or make one and keep it until `forget`. Address and version
            of a weight show most changes of it, but not those through `.data`, nor a new gather of FSDP2 or ZeRO-3 at
            the same address: only a caller that knows when a step begins may keep copies.
    """
    if weights[0].dtype == dtype:
        return weights
    if not keep or torch.compiler.is_compiling() or any(w.is_inference() or not w.is_leaf for w in weights):
        return [_copy(weights, dtype)]
    of = tuple((w.data_ptr(), w._version) for w in weights)
    state = state_of(weights[0])
    kept: WeightCopy | None = state.copy
    if kept is None or kept.of != of or kept.packed.dtype != dtype:
        kept = state.copy = WeightCopy(_copy(weights, dtype), of)
    return [kept.packed]


def forget(weights: Sequence[Tensor]) -> None:
    """Drop the copy that is kept of weights, as a step begins, and their values may have changed."""
    state = find_state(weights[0])
    if state is not None:
        state.copy = None


def _copy(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    if len(weights) == 1:
        return weights[0].to(dtype)
    if torch.compiler.is_compiling():
        return torch.stack([w.to(dtype) for w in weights])
    packed = weights[0].new_empty(len(weights), *weights[0].shape, dtype=dtype)
    torch._foreach_copy_(list(packed.unbind()), [w.detach() for w in weights])  # one launch
    return packed
