"""Layers of experts, a buffer and a queue as plain PyTorch has them: the reference of random training programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.oracle import reference

EXPERTS, HIDDEN, FFN = 3, 8, 4


def with_padding(y: Tensor, x: Tensor) -> Tensor:
    """Zeros after the rows of experts, so that y has as many rows as x."""
    return F.pad(y, (0, 0, 0, len(x) - len(y)))


class Linear(nn.Module):
    """`GroupedLinear` with the same names and order of parameters; experts without rows get zeros, not None."""

    def __init__(self, inputs: int, outputs: int, bias: bool, packed: bool) -> None:
        super().__init__()
        self.packed, self.has_bias, self.wgrad_queue = packed, bias, None
        for group, shape in {"weight": (outputs, inputs), **({"bias": (outputs,)} if bias else {})}.items():
            full = {group: (EXPERTS, *shape)} if packed else {f"{group}{e}": shape for e in range(EXPERTS)}
            for name, size in full.items():
                self.register_parameter(name, nn.Parameter(torch.empty(size)))

    def of_experts(self, group: str) -> list[Tensor]:
        return [getattr(self, group)[e] if self.packed else getattr(self, f"{group}{e}") for e in range(EXPERTS)]

    def biases(self) -> list[Tensor] | None:
        return self.of_experts("bias") if self.has_bias else None

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        y = reference.gemm(x, self.of_experts("weight"), counts)
        if biases := self.biases():
            y = y + torch.stack(biases).repeat_interleave(torch.tensor(counts), 0)
        return with_padding(y, x)

    def backward_dw(self) -> None:
        pass


class MLP(nn.Module):
    """`GroupedMLP`: fc1, the activation, fc2, times probs."""

    def __init__(self, activation: str, bias: bool, packed: bool) -> None:
        super().__init__()
        self.wgrad_queue, self.activation = None, activation
        self.fc1 = Linear(HIDDEN, FFN * (2 if "glu" in activation else 1), bias, packed)
        self.fc2 = Linear(FFN, HIDDEN, bias, packed)

    def forward(self, x: Tensor, counts: list[int], probs: Tensor | None = None) -> Tensor:
        weights = [fc.of_experts("weight") for fc in (self.fc1, self.fc2)]
        biases = self.fc1.biases(), self.fc2.biases()
        return with_padding(reference.rows(x, *weights, counts, probs, *biases, activation=self.activation), x)

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
