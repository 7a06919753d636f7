"""PyTorch's FSDP1 with `use_orig_params=False`: its parameters change their size between forward and step."""

from __future__ import annotations

from torch import Tensor

FLAT = "a FlatParameter of FSDP1 (wrap with use_orig_params=True, or make no buffer)"


def is_flat(param: Tensor) -> bool:
    """Tell whether it is a FlatParameter. Its views, the weights, are not leaves, so their gradients are returned."""
    return getattr(param, "_is_flat_param", False)
