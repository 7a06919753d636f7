"""Recipes: the formats of a layer's GEMMs, as they follow from `recipe=`, `wgrad=` and autocast.

A layer computes in one dtype, that of `h`, and of `y` and `dx` inside it: its input is cast to it, and so are float32
weights, for the time of a call. Biases, probabilities and gradients of weights keep their dtypes. An 8-bit recipe
quantizes the operands of every GEMM in addition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Recipe -> the dtype that the layer computes in.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_block": torch.bfloat16, "mxfp8": torch.bfloat16}
BLOCKS = {"fp8_block": 128, "mxfp8": 32}  # 8-bit recipe -> elements that share a scale along what a GEMM contracts
WGRADS = ("recipe", "bf16")
SAVES = ("x", "tokens")
LEAST_ROWS = 64  # an expert, on average: with fewer, half of a tile of 128 rows and of a block of tokens is empty
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Formats(NamedTuple):
    """Formats of GEMMs' operands, as operators take them, encoded in one string."""

    gemms: str  # an 8-bit recipe; "": as they come
    wgrad: str  # a recipe, with which products are added unrounded

    @property
    def encoded(self) -> str:
        """`"gemms/wgrad"`."""
        return "/".join(self)

    @classmethod
    def decode(cls, encoded: str) -> Formats:
        """The inverse of `encoded`; from "", of a layer without a recipe, two empty strings.

        Without a recipe `impl="torch"` rounds products of wgrad to the dtype of the operands before it adds them to a
        float32 `main_grad`, which is faster.
        """
        gemms, _, wgrad = encoded.partition("/")
        return cls(gemms, wgrad)


def computed_dtypes(x: Tensor, recipe: str | None) -> tuple[torch.dtype, ...]:
    """The dtype that a layer with this input computes in, and then float32 if it casts float32 weights.

    Without a recipe a layer computes in the dtype of x. Autocast to 16 bits is a recipe for float32 and its own dtype.
    """
    if recipe is not None:
        return DTYPES[recipe], torch.float32
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype in NAMES and x.dtype in (dtype, torch.float32):
            return dtype, torch.float32
    return (x.dtype,)


def check_blocks(recipe: str, name: str, out_features: int, in_features: int) -> None:
    """Check that blocks of an 8-bit recipe fit the weight of this name."""
    if recipe not in BLOCKS:
        return
    if out_features % BLOCKS[recipe] or in_features % BLOCKS[recipe]:
        raise ValueError(
            f"{name}: expected multiples of {BLOCKS[recipe]} features, the blocks of recipe={recipe!r}; got "
            f"{out_features} out and {in_features} in"
        )


def formats(recipe: str, wgrad: str, rows: float = 0.0) -> Formats:
    """The formats of a layer with so many `rows` an expert on average."""
    long = recipe in BLOCKS and rows >= LEAST_ROWS
    computed = recipe if long else NAMES[DTYPES[recipe]]
    return Formats(recipe if long else "", computed if wgrad == "recipe" else wgrad)
