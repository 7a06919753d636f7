"""The layer from tokens, and the same step by other libraries, followed by the sum in fp32 main_grad."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

import fusedmlp
from bench.limits.measure import Layer
from bench.limits.shapes import Shape

Steps = dict[str, Callable[[], None]]


class Tokens(Layer):
    """`moe_experts` on tokens, with the same number of rows for every expert, in a random order."""

    def __init__(self, shape: Shape, device: str) -> None:
        T, K = shape.most, shape.R // shape.most
        super().__init__(shape, [T], device)
        self.probs = torch.rand(T, K, device=device, requires_grad=True)
        places = torch.randperm(T, device=device)[:, None] * K + torch.arange(K, device=device)
        self.ids = (places % shape.E).to(torch.int32)

    def run(self) -> torch.Tensor:
        """The layer itself."""
        return fusedmlp.moe_experts(self.x, self.ids, self.probs, self.fc1, self.fc2)


def add(layer: Layer) -> None:
    """Add the gradients of weights to main_grad, as frameworks do."""
    for weight in (layer.fc1, layer.fc2):
        weight.main_grad.add_(weight.grad)
        weight.grad = None


def activate(h: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """SwiGLU, times the probabilities of the rows."""
    gate, linear = h.chunk(2, dim=-1)
    return (F.silu(gate) * linear * probs.unsqueeze(1)).to(h.dtype)


class GroupedMM:
    """PyTorch's grouped_mm with autograd; the gradients are then added to main_grad."""

    def __init__(self, layer: Layer, activate: Callable[..., torch.Tensor] = activate) -> None:
        self.layer, self.activate = layer, activate
        self.ends = layer.counts.cumsum(0).to(torch.int32)

    def forward(self) -> torch.Tensor:
        """Run forward under plain autograd."""
        layer = self.layer
        a = self.activate(F.grouped_mm(layer.x, layer.fc1.mT, offs=self.ends), layer.probs)
        return F.grouped_mm(a, layer.fc2.mT, offs=self.ends)

    def first_step(self) -> None:
        """Forward and backward, which leaves its gradients in `.grad`."""
        self.layer.reset()
        self.forward().backward(self.layer.dy)

    def step(self) -> None:
        """Forward, backward and the adds."""
        self.first_step()
        add(self.layer)


def liger(tokens: Tokens, shape: Shape) -> Steps:
    """Liger's fused MoE, with its own autotuner; nothing if it cannot be imported."""
    os.environ.pop("LIGER_FUSED_MOE_AUTOTUNE", None)  # on
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    except ImportError as error:
        print(error)
        return {}
    probs = tokens.probs.detach().to(tokens.x.dtype).requires_grad_()

    def step() -> None:
        tokens.reset()
        probs.grad = None
        LigerFusedMoEFunction.apply(tokens.x, tokens.fc1, tokens.fc2, tokens.ids, probs).backward(tokens.dy)
        add(tokens)

    return {"step+add": step}


def sonicmoe(tokens: Tokens, shape: Shape) -> Steps:
    """SonicMoE's experts, with QuACK's autotuner, called as in its 0.1.2; nothing if it cannot be imported."""
    try:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import _DownProjection, _UpProjection
        from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton
    except ImportError as error:
        print(error)
        return {}
    (T, K), E, rest = tokens.probs.shape, shape.E, (None, False, ActivationType.SWIGLU, False)

    def experts() -> torch.Tensor:
        lengths = {"frequency": E, "offsets": E + 1, "gather": T * K, "scatter": T * K, "reverse": T * K}
        new = {name: torch.empty(n, dtype=torch.int32, device=tokens.x.device) for name, n in lengths.items()}
        TC_topk_router_metadata_triton(tokens.ids, E, *new.values())
        _, offsets, *places = new.values()
        # SonicMoE's rows of gate and up alternate: which rows of fc1 are which does not change the time.
        fc1, fc2 = tokens.fc1.permute(1, 2, 0), tokens.fc2.permute(1, 2, 0)
        a, h = _UpProjection.apply(tokens.x, fc1, None, offsets, T * K, K, *places, *rest, False)
        return _DownProjection.apply(a, h, fc2, None, tokens.probs, offsets, T, K, *places, *rest[:3])

    def step() -> None:
        tokens.reset()
        experts().backward(tokens.dy)

    def step_and_add() -> None:
        step()
        add(tokens)

    return {"step+add": step_and_add, "step": step}
