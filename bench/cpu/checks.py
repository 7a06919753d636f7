"""Numbers before times: what a peer computed, expert by expert against float64, by the tests' tolerance rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cpu.layers import Layer
from bench.cpu.peers import Level

_ROUNDINGS = 2  # in units of eps, as in fusedmlp/doctor/tolerance.py


class Errors:
    """The largest error and the largest value of every result, of a peer and of plain PyTorch in the same precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.eps = torch.finfo(dtype).eps
        self.found: dict[str, list[float]] = {}  # result -> [peer's error, plain PyTorch's error, scale]

    def add(self, name: str, actual: Tensor, expected: Tensor, low_precision: Tensor) -> None:
        """Compare one part of a result; NaN counts as infinite."""
        if not expected.numel():
            return
        differences = [(t.double() - expected).abs().max() for t in (actual, low_precision)]
        values = [float(d.nan_to_num(float("inf"))) for d in differences] + [float(expected.abs().max())]
        self.found[name] = [max(pair) for pair in zip(self.found.get(name, values), values, strict=True)]

    def relative(self) -> dict[str, float]:
        """By result."""
        return {name: error / scale for name, (error, _, scale) in self.found.items()}

    def allowed(self) -> float:
        """Twice what plain PyTorch loses, and the rounding band."""
        lost = max(low / scale for _, low, scale in self.found.values())
        return 2 * (lost + _ROUNDINGS * self.eps)

    def verify(self, who: str) -> None:
        """Raise if any result is off by more than that."""
        wrong = {name: error for name, error in self.relative().items() if not error <= self.allowed()}
        if wrong:
            raise AssertionError(f"{who}: errors {wrong}, allowed {self.allowed():.2g}")


def check(layer: Layer, level: Level, y: Tensor, who: str, times: int) -> Errors:
    """After `times` runs from a zero `main_grad`: the last `y` and gradients of inputs, and the sum in `main_grad`."""
    errors = Errors(layer.dtype)
    x, dy, probs, dprobs = layer.x_RH, layer.dy_RH, layer.probs_R, layer.probs_R.grad
    dx = x.grad
    if level == "tokens":
        dx, dprobs = layer.x_TH.grad, layer.top_k_weights.grad.flatten()[layer.slots]
    rows = {dtype: {name: [] for name in ("y", "dx", "dprobs")} for dtype in (torch.float64, layer.dtype)}
    first = 0
    for e, count in enumerate(layer.rows):
        own = slice(first, first + count)
        first += count
        grads = {}
        for dtype, results in rows.items():
            tensors = (x[own], probs[own], layer.fc1[e], layer.fc2[e])
            leaf = [t.detach().to(dtype, copy=True).requires_grad_() for t in tensors]
            gate, linear = (leaf[0] @ leaf[2].T).chunk(2, dim=-1)
            y_e = (F.silu(gate) * linear * leaf[1].unsqueeze(1)) @ leaf[3].T
            y_e.backward(dy[own].to(dtype))
            for name, part in zip(("y", "dx", "dprobs"), (y_e.detach(), leaf[0].grad, leaf[1].grad), strict=True):
                results[name].append(part.double())
            grads[dtype] = leaf[2].grad, leaf[3].grad
        for name, weight, expected, low in zip(("dfc1", "dfc2"), layer.weights, *grads.values(), strict=True):
            errors.add(name, weight.main_grad[e] / times, expected, low)
    (expected, low) = ({name: torch.cat(parts) for name, parts in results.items()} for results in rows.values())
    if level == "tokens":  # a token's rows add up
        for results in (expected, low):
            for name in ("y", "dx"):
                results[name] = layer.x_TH.new_zeros(layer.x_TH.shape, dtype=torch.float64).index_add(
                    0, layer.tokens, results[name]
                )
    for name, actual in (("y", y.detach()), ("dx", dx), ("dprobs", dprobs)):
        errors.add(name, actual, expected[name], low[name])
    errors.verify(f"{who} on {layer}")
    return errors
