"""8-bit copies of a layer's weights that outlive a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmlp import validate
from fusedmlp.autograd import weight_copies
from fusedmlp.autograd.layers import Call
from fusedmlp.operators.types import WeightCopies
from fusedmlp.recipe import BLOCKS, DTYPES, Formats, check_blocks
from fusedmlp.validate import ExpertWeight, Input, Options


class QuantizedWeights(NamedTuple):
    """8-bit copies of both weights of an MLP, from `quantize_weights`: for each weight, two bytes and their scales."""

    recipe: str
    weight_layout: str
    fc1: WeightCopies
    fc2: WeightCopies
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
            if copies.by_in.shape != expected or copies.by_in.device != weight.tensors[0].device:
                raise ValueError(
                    f"quantized_weights: expected copies of {name}, shape {expected} on {weight.tensors[0].device}; got"
                    f" shape {tuple(copies.by_in.shape)} on {copies.by_in.device}"
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
    """Quantize the weights of an MLP to 8 bits, for all calls of `grouped_mlp` until the weights change.

    Without it a layer quantizes its weights in every forward and every backward or, with `is_first_microbatch`, once a
    step. Here the caller decides: for inference, or where a framework knows when a step begins. Scales and elements
    are those of TransformerEngine (`Float8BlockScaling`, `MXFP8BlockScaling`).

    Args:
        fc1_weight: `[E, F1, H]`, or a sequence of E tensors `[F1, H]`, bfloat16 or float32 (rounded to bfloat16 first).
        fc2_weight: `[E, H, F]`, or a sequence of E tensors `[H, F]`, likewise.
        recipe: "fp8_block" or "mxfp8".
        weight_layout, impl: as in `grouped_mlp`.

    Returns:
        The argument `quantized_weights` of `grouped_mlp` and `moe_experts`. They take the weights as well, which get
        the gradients, and with which they compute where experts have fewer than 64 rows on average. They raise
        RuntimeError once a weight was written or has another address. They cannot see a write through `.data`, nor a
        gather of FSDP2 or ZeRO-3 to the same address: quantize again after these.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, rank, size or device.
        NotImplementedError: a GPU without kernels for the recipe.
    """
    validate.one_of("recipe", recipe, [*BLOCKS])
    validate.one_of("weight_layout", weight_layout, validate.WEIGHT_LAYOUTS)
    first = validate.first_tensor("fc1_weight", fc1_weight)
    source = Input("fc1_weight", first, (DTYPES[recipe], torch.float32))
    given = {"fc1_weight": fc1_weight, "fc2_weight": fc2_weight}
    weights = {name: validate.experts(name, weight, weight_layout, source) for name, weight in given.items()}
    impl, copies = validate.implementation(impl, first.device), []
    for name, weight in weights.items():
        check_blocks(recipe, name, weight.out_features, weight.in_features)
        logical = [w.mT for w in weight.tensors] if weight_layout == "in_out" else weight.tensors
        copies.append(WeightCopies(*weight_copies.quantize(logical, recipe, impl)))
    fc1, fc2 = copies
    return QuantizedWeights(recipe, weight_layout, fc1, fc2, weight_copies.origin(_tensors(weights)))


def copies_of(call: Call, weights: dict[str, ExpertWeight], options: Options) -> list[Tensor]:
    """8-bit copies of the weights that a call need not make, as `autograd/layers.py` takes them: of all, or none."""
    given = options.quantized_weights
    if given is not None:
        if not isinstance(given, QuantizedWeights):
            raise TypeError(f"quantized_weights: expected None or QuantizedWeights; got {type(given).__name__}")
        given.check(weights, options.recipe, options.weight_layout)
    elif options.recipe not in BLOCKS or not call.keeps_copies:
        return []
    recipe = Formats.decode(call.recipe).gemms
    if not recipe:  # few rows
        return []
    if given is not None:
        return [*given.fc1, *given.fc2]
    tensors = (experts.tensors for experts in weights.values())
    kept = [weight_copies.quantized(group, call.logical(group), recipe, call.impl) for group in tensors]
    return [copy for copies in kept for copy in copies] if all(kept) else []


def _tensors(weights: dict[str, ExpertWeight]) -> list[Tensor]:
    return [w for experts in weights.values() for w in experts.tensors]
