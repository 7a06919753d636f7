"""A step of frozen experts with LoRA (PEFT, rank 16), by who computes them, and without LoRA: time and memory.

    pytest bench/cpu/lora.py --benchmark-only

Each one's results are compared with float64 before it is timed.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.cpu import recording
from bench.cpu.layers import Layer
from bench.oracle import tolerance
from fusedmlp.integrations.transformers import register

RANK = 16
WAYS = {
    "fusedmlp": "fusedmlp",
    "PEFT with grouped_mm": "grouped_mm",
    "PEFT with eager": "eager",
    "fusedmlp without LoRA": "fusedmlp",
}


class _Model(nn.Module):
    def __init__(self, layer: Layer, implementation: str, dtype: torch.dtype) -> None:
        super().__init__()
        shape = layer.shape
        config = Qwen3MoeConfig(hidden_size=shape.H, moe_intermediate_size=shape.F, num_experts=shape.E)
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.experts = Qwen3MoeExperts(config)
        self.experts.gate_up_proj = nn.Parameter(layer.fc1.detach().to(dtype), requires_grad=False)
        self.experts.down_proj = nn.Parameter(layer.fc2.detach().to(dtype), requires_grad=False)

    def forward(self, *rows: Tensor) -> Tensor:
        y: Tensor = self.experts(*rows)
        return y


@cache
def model(layer: Layer, who: str, dtype: torch.dtype) -> nn.Module:
    """The experts, with the same adapters for all."""
    register()
    made = _Model(layer, WAYS[who], dtype)
    if "without" in who:
        return made
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=RANK, target_modules=[], target_parameters=names, init_lora_weights=False)
    torch.manual_seed(1)
    adapted: nn.Module = get_peft_model(made, config)
    return adapted


def forward(layer: Layer, who: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`y`, `x` and the adapters."""
    module = model(layer, who, dtype)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = None
    x = layer.x_TH.detach().to(dtype).requires_grad_()
    return module(x, layer.top_k_index, layer.top_k_weights.detach().to(dtype)), x, trained


def step(layer: Layer, who: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Forward and backward: `y` and gradients."""
    y, x, trained = forward(layer, who, dtype)
    y.backward(layer.dy_TH.to(dtype))
    grads = {f"adapter {i}": parameter.grad for i, parameter in enumerate(trained)}
    return {"y": y.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


@cache
def checked(layer: Layer, who: str) -> dict[str, Any]:
    """Compare with float64; then count memory and operators."""
    if "without" not in who:
        found, low = (
            {name: t.double() for name, t in step(layer, each, layer.dtype).items()}
            for each in (who, "PEFT with eager")
        )
        tolerance.assert_close(found, step(layer, "PEFT with eager", torch.float64), low, layer.dtype)
    return recording.footprint(lambda: step(layer, who, layer.dtype))._asdict()


@pytest.mark.parametrize("who", WAYS)
def test_step(layer, who, record):
    extra = checked(layer, who)
    record(layer, f"step with LoRA, rank {RANK}", who, partial(step, layer, who, layer.dtype), layer.reset, **extra)
