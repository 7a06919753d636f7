"""Steps of frozen experts with adapters: ours, without adapters, and as PEFT computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmlp
from bench.gpu.peers import Tokens, activate
from bench.limits.measure import Layer

RANK, SCALING = 16, 2.0


def steps(layer: Layer) -> dict[str, Callable[[], None]]:
    """Forward and backward, by name. Rows of a layer are sorted, or those of its tokens gathered."""
    weights = [weight.detach() for weight in layer.weights]
    adapters = []
    for E, out, size_in in (weight.shape for weight in weights):
        options = {"dtype": torch.bfloat16, "device": layer.x.device, "requires_grad": True}
        adapters.append((torch.randn(E, RANK, size_in, **options), torch.randn(E, out, RANK, **options)))  # type: ignore[call-overload]
    ends = layer.counts.cumsum(0).to(torch.int32)
    tokens = isinstance(layer, Tokens)

    def ours(with_adapters: bool = True) -> Tensor:
        fc1_lora, fc2_lora = (fusedmlp.LoRA(A, B, SCALING) if with_adapters else None for A, B in adapters)
        if isinstance(layer, Tokens):
            given = layer.x, layer.ids, layer.probs, *weights
            return fusedmlp.moe_experts(*given, fc1_lora=fc1_lora, fc2_lora=fc2_lora)
        given = layer.x, *weights, layer.counts
        return fusedmlp.grouped_mlp(*given, probs=layer.probs, fc1_lora=fc1_lora, fc2_lora=fc2_lora)

    def dense() -> Tensor:
        fc1, fc2 = (torch.baddbmm(w, B, A, alpha=SCALING) for w, (A, B) in zip(weights, adapters, strict=True))
        a = activate(F.grouped_mm(layer.x, fc1.mT, offs=ends), layer.probs)
        return F.grouped_mm(a, fc2.mT, offs=ends)

    def step(forward: Callable[[], Tensor]) -> None:
        layer.reset()
        for factor in (factor for adapter in adapters for factor in adapter):
            factor.grad = None
        forward().backward(layer.dy)

    made = {"LoRA step": lambda: step(ours), "frozen step": lambda: step(lambda: ours(False))}
    return made if tokens else {**made, "LoRA step, W + B A by grouped_mm": lambda: step(dense)}
