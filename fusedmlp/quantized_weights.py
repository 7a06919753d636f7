"""Copies of a layer's weights, in 8 or 16 bits, that outlive a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmlp import validate
from fusedmlp.autograd import weight_copies
from fusedmlp.autograd.call import Call
from fusedmlp.operators.types import WeightCopies
from fusedmlp.recipe import BLOCKS, DTYPES, Formats, check_blocks
from fusedmlp.validate import ExpertWeight, Input, Options


class QuantizedWeights(NamedTuple):
    """Copies of both weights of an MLP, from `quantize_weights`.

    In 8 bits: `WeightCopies`, two bytes and their scales for each weight. In 16 bits: a tensor `[E, out, in]` for each.
    """

    recipe: str
    weight_layout: str
    fc1: tuple[Tensor, ...]
    fc2: tuple[Tensor, ...]
    of: tuple[tuple[int, int], ...]  # address and version of every weight when it was quantized

    def check(self, weights: dict[str, ExpertWeight], recipe: str | None, weight_layout: str) -> None:
        """Raise unless these are copies of the weights as they are now, in this recipe and layout."""
        if (recipe, weight_layout) != (self.recipe, self.weight_layout):
            raise ValueError(
                f"quantized_weights: expected recipe={self.recipe!r} and weight_layout={self.weight_layout!r}, as they "
                f"were made with; got {recipe!r} and {weight_layout!r}"
            )
        for (name, weight), copies in zip(weights.items(), (self.fc1, self.fc2), strict=True):
            expected = weight.num_experts, weight.out_features, weight.in_features
            if copies[0].shape != expected or copies[0].device != weight.tensors[0].device:
                raise ValueError(
                    f"quantized_weights: expected copies of {name}, shape {expected} on {weight.tensors[0].device}; got"
                    f" shape {tuple(copies[0].shape)} on {copies[0].device}"
                )
        if not torch.compiler.is_compiling() and not self.are_of(_tensors(weights)):
            raise RuntimeError(
                "quantized_weights: expected copies of these weights as they are; got copies of others, or of these "
                "before they were written or moved (call quantize_weights after every step of the optimizer)"
            )

    def are_of(self, weights: Sequence[Tensor]) -> bool:
        """Compare address and version of the weights, of fc1 and then fc2, with those that were quantized."""
        return weight_copies.origin(weights) == self.of


def quantize_weights(
    fc1_weight: Tensor | Sequence[Tensor],
    fc2_weight: Tensor | Sequence[Tensor],
    recipe: str,
    *,
    weight_layout: str = "out_in",
    impl: str = "auto",
) -> QuantizedWeights:
    """Copy the weights of an MLP in what a recipe computes in, for all calls of `grouped_mlp` until the weights change.

    Without it a layer makes such copies in every forward and every backward. Here the caller decides: once for the
    micro-batches of a step, or for inference. 8-bit scales and elements are those of TransformerEngine
    (`Float8BlockScaling`, `MXFP8BlockScaling`).

    Args:
        fc1_weight: `[E, F1, H]`, or a sequence of E tensors `[F1, H]`, float32, or bfloat16 with an 8-bit recipe (which
            rounds float32 to bfloat16 first).
        fc2_weight: `[E, H, F]`, or a sequence of E tensors `[H, F]`, likewise.
        recipe: "fp8_block", "mxfp8", "bf16" or "fp16".
        weight_layout, impl: as in `grouped_mlp`.

    Returns:
        The argument `quantized_weights` of `grouped_mlp` and `moe_experts`. They take the weights as well, which get
        the gradients, and with which 8-bit recipes compute where experts have fewer than 64 rows on average. They raise
        RuntimeError once a weight was written or has another address. They cannot see a write through `.data`, nor a
        gather of FSDP2 or ZeRO-3 to the same address: quantize again after these.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, rank, size or device.
        NotImplementedError: a GPU without kernels for the recipe.
    """
    validate.one_of("recipe", recipe, [*DTYPES])
    validate.one_of("weight_layout", weight_layout, validate.WEIGHT_LAYOUTS)
    first = validate.first_tensor("fc1_weight", fc1_weight)
    dtypes = (DTYPES[recipe], torch.float32) if recipe in BLOCKS else (torch.float32,)
    source = Input("fc1_weight", first, dtypes)
    given = {"fc1_weight": fc1_weight, "fc2_weight": fc2_weight}
    weights = {name: validate.experts(name, weight, weight_layout, source) for name, weight in given.items()}
    impl, copies = validate.implementation(impl, first.device), []
    for name, weight in weights.items():
        check_blocks(recipe, name, weight.out_features, weight.in_features)
        copies.append(_copies(weight, recipe, weight_layout == "in_out", impl))
    fc1, fc2 = copies
    return QuantizedWeights(recipe, weight_layout, fc1, fc2, weight_copies.origin(_tensors(weights)))


def _copies(weight: ExpertWeight, recipe: str, transposed: bool, impl: str) -> tuple[Tensor, ...]:
    if recipe in BLOCKS:
        logical = [w.mT for w in weight.tensors] if transposed else weight.tensors
        return WeightCopies(*weight_copies.quantize(logical, recipe, impl))
    with torch.no_grad():
        copy = weight_copies.packed(weight.tensors, DTYPES[recipe])
    return (copy.mT if transposed else copy,)


def copies_of(call: Call, weights: dict[str, ExpertWeight], options: Options) -> list[Tensor]:
    """The copies of `quantized_weights=`, as `autograd/layers.py` takes them; empty if the call computes without."""
    given = options.quantized_weights
    if given is None:
        return []
    if not isinstance(given, QuantizedWeights):
        raise TypeError(f"quantized_weights: expected None or QuantizedWeights; got {type(given).__name__}")
    given.check(weights, options.recipe, options.weight_layout)
    few_rows = given.recipe in BLOCKS and not Formats.decode(call.recipe).gemms
    return [] if few_rows else [*given.fc1, *given.fc2]


def _tensors(weights: dict[str, ExpertWeight]) -> list[Tensor]:
    return [w for experts in weights.values() for w in experts.tensors]
