"""The oracle: a grouped MLP in plain autograd, one expert at a time, in any dtype; shares no code with the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(
    name: str,
    h: Tensor,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    linear_offset: float = 0.0,
) -> Tensor:
    """The activation of `h` `[R, G]`, as `Activation` names and describes it."""

    def sigmoid_curve(default: float) -> Callable[[Tensor], Tensor]:
        scale = default if alpha is None else alpha
        return lambda t: t * torch.sigmoid(scale * t)

    curves: dict[str, Callable[[Tensor], Tensor]] = {
        "swiglu": sigmoid_curve(1.0),
        "silu": sigmoid_curve(1.0),
        "quick_geglu": sigmoid_curve(1.702),
        "quick_gelu": sigmoid_curve(1.702),
        "geglu": lambda t: 0.5 * t * (1 + torch.erf(t / math.sqrt(2))),
        "gelu": lambda t: 0.5 * t * (1 + torch.erf(t / math.sqrt(2))),
        "geglu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "reglu": F.relu,
        "relu": F.relu,
        "relu2": lambda t: F.relu(t) ** 2,
    }
    if name not in ("swiglu", "quick_geglu", "geglu", "geglu_tanh", "reglu"):
        return curves[name](h)
    if interleaved:
        gate, linear = h[:, 0::2], h[:, 1::2]
    else:
        half = h.shape[1] // 2
        gate, linear = h[:, :half], h[:, half:]
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(min=-limit, max=limit)
    return curves[name](gate) * (linear + linear_offset)


def grouped_mlp(inputs: Any, dtype: torch.dtype, magnitudes: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Results of the case's forward and backward, computed in `dtype`; keys as `factory.run` returns them.

    Into `magnitudes`, a dict, goes what `tolerance.scales` takes: results computed from the magnitudes of their terms.
    """

    def note(**results: Tensor) -> None:
        assert magnitudes is not None
        for name, result in results.items():
            if result.numel():
                magnitudes[name] = max(magnitudes.get(name, result.new_zeros(())), result.detach().max())

    case, size = inputs.case, torch.abs
    leaf = {name: t.detach().clone().to(dtype).requires_grad_() for name, t in inputs.tensors().items()}
    ys, row = [], 0
    for e, n in enumerate(case.counts):
        x = leaf["x"][row : row + n]
        fc1, fc2 = leaf["fc1"][e], leaf["fc2"][e]
        if case.layout == "in_out":
            fc1, fc2 = fc1.T, fc2.T
        h = x @ fc1.T
        if case.bias:
            h = h + leaf["bias1"][e]
        a = activate(case.activation, h, **case.options)
        y = a @ fc2.T
        if case.bias:
            y = y + leaf["bias2"][e]
        probs = leaf["probs"][row : row + n, None] if case.probs else 1
        if magnitudes is not None:
            terms = size(a) @ size(fc2.T) + (size(leaf["bias2"][e]) if case.bias else 0)
            dy = size(inputs.dy[row : row + n].to(dtype))
            note(y=terms * probs, dprobs=(dy * terms).sum(1), dbias2=(dy * probs).sum(0))
            note(fc2=inputs.initial_main_grad + (dy * probs).T @ size(a))
            h.register_hook(lambda dh, x=x: note(fc1=inputs.initial_main_grad + size(dh).T @ size(x)))
            h.register_hook(lambda dh, fc1=fc1: note(dx=size(dh) @ size(fc1), dbias1=size(dh).sum(0)))
        if case.probs:
            y = (y * probs).to(dtype)
        ys.append(y)
        row += n
    ys.append(torch.zeros(inputs.x.shape[0] - row, inputs.x.shape[1], dtype=dtype))
    y = torch.cat(ys)
    y[:row].backward(inputs.dy[:row].to(dtype))
    results = {"y": y.detach()}
    names = {"x": "dx", "probs": "dprobs", "fc1": "fc1", "fc2": "fc2", "bias1": "dbias1", "bias2": "dbias2"}
    for name, tensor in leaf.items():
        grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if name in ("fc1", "fc2"):
            grad = grad.double() + inputs.initial_main_grad
        results[names[name]] = grad
    return {name: t.double() for name, t in results.items()}
