"""Peers: ways to run one layer's forward and backward that end with the gradients in fp32 `main_grad`.

A peer takes sorted rows ("rows") or tokens and their experts ("tokens"). If its gradients come in `.grad`, a
`main_grad.add_` follows, which fusedmlp does without. `missing` says why a peer cannot run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmlp
from bench.cpu.layers import Layer

Level = Literal["rows", "tokens"]


@dataclass(frozen=True)
class Peer:
    """One way to run a layer."""

    name: str
    level: Level
    forward: Callable[[Layer], Tensor]
    missing: Callable[[str], str] = lambda _: ""  # by device; empty: it can run
    adds: bool = True  # whether its gradients come in .grad

    def backward(self, layer: Layer, y: Tensor) -> None:
        """Run backward until the gradients are in `main_grad`."""
        y.backward(layer.dy_RH if self.level == "rows" else layer.dy_TH)
        if self.adds:
            for weight in layer.weights:
                weight.main_grad.add_(weight.grad)
                weight.grad = None


def _fused_rows(layer: Layer) -> Tensor:
    return fusedmlp.grouped_mlp(layer.x_RH, layer.fc1, layer.fc2, layer.counts, probs=layer.probs_R)


def _fused_tokens(layer: Layer) -> Tensor:
    return fusedmlp.moe_experts(layer.x_TH, layer.top_k_index, layer.top_k_weights, layer.fc1, layer.fc2)


def _grouped_mm(layer: Layer) -> Tensor:
    gate, linear = F.grouped_mm(layer.x_RH, layer.fc1.mT, offs=layer.ends).chunk(2, dim=-1)
    a = (F.silu(gate) * linear * layer.probs_R.unsqueeze(1)).to(layer.dtype)
    return F.grouped_mm(a, layer.fc2.mT, offs=layer.ends)


def _loop(layer: Layer) -> Tensor:
    outputs = []
    parts = zip(layer.x_RH.split(layer.rows), layer.probs_R.split(layer.rows), layer.fc1, layer.fc2, strict=True)
    for x, probs, fc1, fc2 in parts:
        gate, linear = (x @ fc1.T).chunk(2, dim=-1)
        a = (F.silu(gate) * linear * probs.unsqueeze(1)).to(layer.dtype)
        outputs.append(a @ fc2.T)
    return torch.cat(outputs)


def _transformers(implementation: str) -> Callable[[Layer], Tensor]:
    def forward(layer: Layer) -> Tensor:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        shape = layer.shape
        config = Qwen3MoeConfig(hidden_size=shape.H, moe_intermediate_size=shape.F, num_experts=shape.E)
        config._experts_implementation = implementation
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        module.gate_up_proj, module.down_proj = layer.fc1, layer.fc2
        return module(layer.x_TH, layer.top_k_index, layer.top_k_weights.to(layer.dtype))

    return forward


def _liger(layer: Layer) -> Tensor:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    index = layer.top_k_index.to(torch.int32)
    return LigerFusedMoEFunction.apply(layer.x_TH, *layer.weights, index, layer.top_k_weights)


def _transformer_engine(layer: Layer) -> Tensor:
    """TransformerEngine's GroupedLinear layers, which add into main_grad; PyTorch's activation between them."""
    te = __import__("transformer_engine.pytorch").pytorch
    shape = layer.shape

    def linear(weight: Tensor, x: Tensor) -> Tensor:
        options = {"bias": False, "params_dtype": layer.dtype, "device": layer.device}
        module = te.GroupedLinear(shape.E, *weight.shape[:0:-1], fuse_wgrad_accumulation=True, **options)
        for e in range(shape.E):
            parameter = getattr(module, f"weight{e}")
            parameter.data, parameter.main_grad = weight.detach()[e], weight.main_grad[e]
        return module(x, layer.rows)

    gate, up = linear(layer.fc1, layer.x_RH).chunk(2, dim=-1)
    a = (F.silu(gate) * up * layer.probs_R.unsqueeze(1)).to(layer.dtype)
    return linear(layer.fc2, a)


def needs(*modules: str, gpu: bool = True) -> Callable[[str], str]:
    """Why a peer cannot run on a device: a module of it is not installed, or it runs on GPUs alone."""

    def missing(device: str) -> str:
        for module in modules:
            if find_spec(module) is None:
                return f"{module} is not installed"
        return "needs a GPU" if gpu and device == "cpu" else ""

    return missing


FUSED_ROWS = Peer("fusedmlp", "rows", _fused_rows, adds=False)
FUSED_TOKENS = Peer("fusedmlp moe_experts", "tokens", _fused_tokens, adds=False)
PEERS = (
    FUSED_ROWS,
    Peer("grouped_mm", "rows", _grouped_mm),
    Peer("loop over experts", "rows", _loop),
    Peer("TransformerEngine", "rows", _transformer_engine, needs("transformer_engine"), adds=False),
    FUSED_TOKENS,
    Peer("Transformers grouped_mm", "tokens", _transformers("grouped_mm"), needs("transformers", gpu=False)),
    Peer("Transformers eager", "tokens", _transformers("eager"), needs("transformers", gpu=False)),
    Peer("Liger", "tokens", _liger, needs("liger_kernel")),
    # Transformers loads the kernel from the Hub, and that is written in CuTe DSL (PyPI: nvidia-cutlass-dsl).
    Peer("SonicMoE", "tokens", _transformers("sonicmoe"), needs("kernels", "cutlass")),
)
