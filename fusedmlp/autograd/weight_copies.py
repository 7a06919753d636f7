"""Copies of weights in the format that GEMMs take: float32 weights in 16 bits, and any weights in 8 bits.

A layer makes a copy for one call. Copies that outlive a call are those of `quantize_weights`: address and version of a
weight show most changes of it, but not those through `.data`, nor a new gather of FSDP2 or ZeRO-3 at the same address,
so only a caller that knows when weights change may keep copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedmlp.operators import ops


def computed(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The weights themselves (packed, or one for each expert) if they have this dtype, else one packed copy."""
    return weights if weights[0].dtype == dtype else [packed(weights, dtype)]


def packed(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A copy of the weights in this dtype, `[E, ...]`."""
    if len(weights) == 1 and weights[0].dim() == 3:
        return weights[0].to(dtype)
    if torch.compiler.is_compiling():
        return torch.stack([w.to(dtype) for w in weights])
    copy = weights[0].new_empty(len(weights), *weights[0].shape, dtype=dtype)
    torch._foreach_copy_(list(copy.unbind()), [w.detach() for w in weights])  # one launch
    return copy


def quantize(logical: Sequence[Tensor], recipe: str, impl: str) -> list[Tensor]:
    """Elements and scales for products over in features, then those for products over out features. `logical`: `[out,
    in]` views of the weights.
    """
    with torch.no_grad():
        return [*ops.quantize_weights([*logical], recipe, impl)]


def origin(weights: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Address and version of each weight: they tell a copy's weights from others, and from what these become."""
    return tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
