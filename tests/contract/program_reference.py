"""Layers of experts, a buffer and a queue as plain PyTorch has them: the reference of random training programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, HIDDEN, FFN = 3, 8, 4

_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def split(x: Tensor, counts: list[int]) -> tuple[list[Tensor], Tensor]:
    """Rows of each expert, also of those without any, so that their weights get zeros and not None; and padding."""
    *parts, padding = x.split([*counts, len(x) - sum(counts)])
    return parts, padding


class Linear(nn.Module):
    """`GroupedLinear` with the same names and order of parameters."""

    def __init__(self, inputs: int, outputs: int, bias: bool, packed: bool) -> None:
        super().__init__()
        self.packed, self.has_bias, self.wgrad_queue = packed, bias, None
        for group, shape in {"weight": (outputs, inputs), **({"bias": (outputs,)} if bias else {})}.items():
            full = {group: (EXPERTS, *shape)} if packed else {f"{group}{e}": shape for e in range(EXPERTS)}
            for name, size in full.items():
                self.register_parameter(name, nn.Parameter(torch.empty(size)))

    def expert(self, x: Tensor, e: int) -> tuple[Tensor, Tensor | float]:
        """The product with expert e's weight, and its bias."""

        def of(group: str) -> Tensor:
            return getattr(self, group)[e] if self.packed else getattr(self, f"{group}{e}")

        return x @ of("weight").T, of("bias") if self.has_bias else 0.0

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        parts, padding = split(x, counts)
        ys = [sum(self.expert(part, e)) for e, part in enumerate(parts)]
        return torch.cat([*ys, torch.zeros(len(padding), ys[0].shape[1], dtype=x.dtype)])

    def backward_dw(self) -> None:
        pass


class MLP(nn.Module):
    """`GroupedMLP`: fc1, the activation times probs, fc2."""

    def __init__(self, activation: str, bias: bool, packed: bool) -> None:
        super().__init__()
        self.wgrad_queue = None
        self.curve, self.gated = _CURVES[activation], "glu" in activation
        self.fc1 = Linear(HIDDEN, FFN * (2 if self.gated else 1), bias, packed)
        self.fc2 = Linear(FFN, HIDDEN, bias, packed)

    def forward(self, x: Tensor, counts: list[int], probs: Tensor | None = None) -> Tensor:
        parts, padding = split(x, counts)
        ps, _ = split(torch.ones(len(x), dtype=x.dtype) if probs is None else probs, counts)
        ys = []
        for e, (part, p) in enumerate(zip(parts, ps, strict=True)):
            h = sum(self.fc1.expert(part, e))
            gate, linear = h.chunk(2, dim=1) if self.gated else (h, 1.0)
            ys.append(sum(self.fc2.expert(self.curve(gate) * linear, e)) * p[:, None])
        return torch.cat([*ys, torch.zeros(len(padding), HIDDEN, dtype=x.dtype)])

    def backward_dw(self) -> None:
        pass


class Queue:
    """A queue of nothing: plain PyTorch delays no gradient."""

    def run(self) -> None:
        pass

    run_oldest = run


class Buffer:
    """The effect of the methods of a `MainGradBuffer` on `.grad`."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])

    def clip_norm_(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.params, max_norm)

    def scale(self, factor: float) -> None:
        """Scale `flat`: a parameter without a gradient in it gets zeros."""
        for param in self.params:
            if param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)
            if param.grad is not None:
                param.grad.mul_(factor)

    def detach(self) -> None:
        pass
