"""Loops that train from a `MainGradBuffer`, and the same loops over plain gradients.

The reference of each loop adds the gradients of its micro-batches in float32 itself, and rounds them for its optimizer.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn

import fusedmlp
from fusedmlp.integrations.fp32_accumulation import FP32Accumulation

COUNTS = [3, 0, 2]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
}
SGD = OPTIMIZERS["SGD"]


def buffer_of(model, optimizer):
    model.buffer = fusedmlp.MainGradBuffer(model.parameters())  # kept as long as the model
    return model.buffer


KEPT_IN_FP32 = pytest.mark.parametrize("keep", [buffer_of, FP32Accumulation], ids=["buffer", "FP32Accumulation"])


class Model(nn.Module):
    """A plain layer, fused experts with biases, and a weight that both kinds of layers use."""

    def __init__(self, dtype=torch.float32, accumulate="auto", **options):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, 4).to(dtype)
        self.experts = fusedmlp.GroupedMLP(3, 4, 5, bias=True, accumulate_wgrad=accumulate, dtype=dtype, **options)

    def forward(self, x, **options):
        return self.experts(self.router(x), COUNTS, **options) + self.experts.fc2.weight.mean()


def batch(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + seed)
    return (torch.randn(5, 4, generator=generator).to(dtype) for _ in range(2))


def backward(model, seed, scale=1.0, **options):
    x, dy = batch(seed, model.router.weight.dtype)
    loss = (model(x, **options) * dy).sum() * scale
    loss.backward()
    return loss.detach()


def sums(model, seeds):
    """Gradients of each micro-batch by itself, added in float32, of a model whose layers return them."""
    total = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for seed in seeds:
        model.zero_grad()
        backward(model, seed)
        for each, param in zip(total, model.parameters(), strict=True):
            each += param.grad
    model.zero_grad()
    return total


def set_grads(model, grads, max_norm=math.inf):
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = (grad * min(1.0, max_norm / (norm.item() + 1e-6))).to(param.dtype)


def assert_same(model, reference, dtype):
    """Parameters after steps; in 16 bits, an update may round to the next number."""
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=eps, atol=eps, msg=lambda m, name=name: f"{name}: {m}")


def twins(dtype, make_optimizer, **options):
    reference, model = Model(dtype, "off"), Model(dtype, **options)
    return (reference, make_optimizer(reference.parameters())), (model, make_optimizer(model.parameters()))
