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
from fusedmlp.validate import Experts, Input, Options


class QuantizedWeights(NamedTuple):
    """8-bit copies of both weights of an MLP, from `quantize_weights`: for each weight, two bytes and their scales."""

    recipe: str
    fc1: WeightCopies
    fc2: WeightCopies
    versions: tuple[int, ...]  # of the weights when they were quantized

    def check(self, weights: dict[str, Experts], recipe: str | None) -> None:
        """Raise unless these are copies of the weights as they are now, in this recipe."""
        if recipe != self.recipe:
            raise ValueError(f"quantized_weights: expected recipe={self.recipe!r}, theirs; got recipe={recipe!r}")
        for (name, weight), copies in zip(weights.items(), (self.fc1, self.fc2), strict=True):
            expected = weight.num_experts, weight.out_features, weight.in_features
            if copies.by_in.shape != expected or copies.by_in.device != weight.tensors[0].device:
                raise ValueError(
                    f"quantized_weights: expected copies of {name}, shape {expected} on {weight.tensors[0].device}; got"
                    f" shape {tuple(copies.by_in.shape)} on {copies.by_in.device}"
                )
        if not torch.compiler.is_compiling() and not self.are_of(_tensors(weights)):
            raise RuntimeError(
                "quantized_weights: expected copies of the weights as they are; got weights that were written since "
                "(call quantize_weights after every step of the optimizer)"
            )

    def are_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether no write to the weights, of fc1 and then fc2, was counted since these copies of them were made."""
        return _versions(weights) == self.versions


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
        `quantized_weights` for `grouped_mlp` and `moe_experts`, beside the weights, which get the gradients, and with
        which a layer computes when experts have fewer than 64 rows on average. A write to a weight that PyTorch counts
        makes the copies unusable (RuntimeError); a write through `.data`, and FSDP2's or ZeRO-3's gathers, are not
        counted: quantize again after each.

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
    return QuantizedWeights(recipe, fc1, fc2, _versions(_tensors(weights)))


def copies_of(call: Call, weights: dict[str, Experts], options: Options) -> list[Tensor]:
    """8-bit copies of the weights that a call need not make, as `autograd/layers.py` takes them: of all, or none."""
    recipe, given = Formats.decode(call.recipe).gemms, options.quantized_weights
    if given is not None:
        if not isinstance(given, QuantizedWeights):
            raise TypeError(f"quantized_weights: expected None or QuantizedWeights; got {type(given).__name__}")
        given.check(weights, options.recipe)
    if not recipe:
        return []
    if given is not None:
        return [*given.fc1, *given.fc2]
    if not call.keeps_copies:
        return []
    tensors = (experts.tensors for experts in weights.values())
    kept = [weight_copies.quantized(group, call.logical(group), recipe, call.impl) for group in tensors]
    return [copy for copies in kept for copy in copies] if all(kept) else []


def _tensors(weights: dict[str, Experts]) -> list[Tensor]:
    return [w for experts in weights.values() for w in experts.tensors]


def _versions(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(0 if w.is_inference() else w._version for w in weights)
