"""Recipes: the formats of a layer's GEMMs, as they follow from `recipe=`, `wgrad=` and autocast.

A layer computes in one dtype, that of `h`, and of `y` and `dx` inside it: its input is cast to it, and so are float32
weights, for the time of a call. Biases, probabilities and gradients of weights keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # recipe -> the dtype that the layer computes in
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def computed_dtypes(x: Tensor, recipe: str | None) -> tuple[torch.dtype, ...]:
    """The dtype that a layer with this input computes in, and then float32 if it casts float32 weights.

    Without a recipe a layer computes in the dtype of x. Autocast to 16 bits is a recipe for float32 and its own dtype.
    """
    if recipe is not None:
        return DTYPES[recipe], torch.float32
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype in _NAMES and x.dtype in (dtype, torch.float32):
            return dtype, torch.float32
    return (x.dtype,)


def of_wgrad(dtype: torch.dtype, weights: Sequence[Tensor], recipe: str | None) -> str:
    """The format of the weight gradients' operands, whose products are added unrounded; "": of a layer without recipe.

    Such a layer's weights have the `dtype` that it computes in, and `impl="torch"` rounds products to that before it
    adds them to a float32 `main_grad`, which is faster.
    """
    casts = any(weight.dtype != dtype for weight in weights)
    return _NAMES.get(dtype, "") if recipe is not None or casts else ""
