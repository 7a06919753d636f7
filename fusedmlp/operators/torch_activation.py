"""Activations and their derivatives for the `torch` implementation, written into given outputs.

PyTorch's silu, sigmoid and gelu compute the last elements of a thread's share by other code than the rest, which gives
other bits. Its exp, erf and tanh do not: `batch_invariant` curves are made of these.

`c` is the scalar curve, `g` the gate, `m = bounded(clamp(l)) + linear_offset` the linear factor: `act = c(g) * m`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmlp.activation import Activation

_aten = torch.ops.aten
_CUBIC = 0.044715  # of gelu_tanh: u = sqrt(2 / pi) * (x + _CUBIC * x^3)


def forward(activation: Activation, h: Tensor, out: Tensor, batch_invariant: bool = False) -> Tensor:
    """`act(h)`: `[R, F1] -> [R, F]`, into `out`."""
    curve = (_INVARIANT if batch_invariant else _CURVES)[activation.curve]
    if not activation.gated:
        return curve.forward(h, activation.sigmoid_alpha, out)
    gate, linear = _factors(activation, h)
    return curve.forward(gate, activation.sigmoid_alpha, out).mul_(linear)


def backward(
    activation: Activation, h: Tensor, grad: Tensor, act: Tensor, dh: Tensor, batch_invariant: bool = False
) -> None:
    """Write `act(h)` to `act` and the gradient of `h` to `dh`; `grad` is that of `act(h)`. Forward saves only `h`.

    `dg = grad * m * c'(g)` and `dl = grad * c(g)`, each zero where its clamp is active (a value equal to the limit
    passes, as in `torch.clamp`).
    """
    curve, alpha = (_INVARIANT if batch_invariant else _CURVES)[activation.curve], activation.sigmoid_alpha
    if not activation.gated:
        curve.forward(h, alpha, act)
        curve.backward_(dh.copy_(grad), h, alpha)
        return
    gate, linear = _factors(activation, h)
    dgate, dlinear = activation.split(dh)
    curve.forward(gate, alpha, act)
    torch.mul(grad, act, out=dlinear)
    curve.backward_(torch.mul(grad, linear, out=dgate), gate, alpha)
    act.mul_(linear)
    if activation.limit is not None:
        raw_gate, raw_linear = activation.split(h)
        dgate.masked_fill_(raw_gate > activation.limit, 0)
        dlinear.masked_fill_(raw_linear.abs() > activation.limit, 0)
    if activation.linear_bound is not None:
        tanh = torch.tanh(_clamped(activation, h)[1] / activation.linear_bound)
        dlinear.mul_(1 - tanh * tanh)


def _clamped(activation: Activation, h: Tensor) -> tuple[Tensor, Tensor]:
    gate, linear = activation.split(h)
    if activation.limit is not None:
        gate, linear = gate.clamp(max=activation.limit), linear.clamp(-activation.limit, activation.limit)
    return gate, linear


def _factors(activation: Activation, h: Tensor) -> tuple[Tensor, Tensor]:
    gate, linear = _clamped(activation, h)
    if activation.linear_bound is not None:
        linear = activation.linear_bound * torch.tanh(linear / activation.linear_bound)
    if activation.linear_offset:
        linear = linear + activation.linear_offset
    return gate, linear


class _Curve(NamedTuple):
    forward: Callable[[Tensor, float, Tensor], Tensor]  # (x, alpha, out) -> out = c(x)
    backward_: Callable[[Tensor, Tensor, float], object]  # (grad, x, alpha): grad *= c'(x)


def _sigmoid(x: Tensor, alpha: float, out: Tensor) -> Tensor:
    if alpha == 1.0:
        _aten.silu.out(x, out=out)
        return out
    return torch.mul(x, torch.sigmoid(alpha * x), out=out)


def _sigmoid_backward_(grad: Tensor, x: Tensor, alpha: float) -> None:
    # x * sigmoid(alpha * x) = silu(alpha * x) / alpha, so its derivative is silu'(alpha * x).
    _aten.silu_backward.grad_input(grad, x if alpha == 1.0 else alpha * x, grad_input=grad)


def _gelu(approximate: str) -> _Curve:
    return _Curve(
        lambda x, alpha, out: _aten.gelu.out(x, approximate=approximate, out=out),
        lambda grad, x, alpha: _aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=grad),
    )


def _logistic(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


def _logistic_backward_(grad: Tensor, x: Tensor, alpha: float) -> None:
    ax = alpha * x
    s = _logistic(ax)
    grad.mul_((1 - s).mul_(ax).add_(1).mul_(s))


def _normal(x: Tensor) -> Tensor:
    """The normal distribution: gelu is `x * normal(x)`."""
    return torch.erf(x * 0.5**0.5).add_(1).mul_(0.5)


def _normal_backward_(grad: Tensor, x: Tensor, alpha: float) -> None:
    density = (x * x).mul_(-0.5).exp_().mul_((2 * math.pi) ** -0.5)
    grad.mul_(density.mul_(x).add_(_normal(x)))


def _normal_by_tanh(x: Tensor) -> Tensor:
    return (x * x).mul_(_CUBIC).add_(1).mul_(x).mul_((2 / math.pi) ** 0.5).tanh_().add_(1).mul_(0.5)


def _normal_by_tanh_backward_(grad: Tensor, x: Tensor, alpha: float) -> None:
    n = _normal_by_tanh(x)  # of derivative 2 n (1 - n) u'
    slope = (x * x).mul_(3 * _CUBIC).add_(1).mul_((8 / math.pi) ** 0.5)
    grad.mul_((1 - n).mul_(n).mul_(slope).mul_(x).add_(n))  # far from zero n (1 - n) is 0, and x^3 infinite


def _situ_backward_(grad: Tensor, x: Tensor, alpha: float) -> None:
    t, s = torch.tanh(x / alpha), _logistic(x)
    grad.mul_((1 - t * t) * s + alpha * t * s * (1 - s))


_CURVES = {
    "sigmoid": _Curve(_sigmoid, _sigmoid_backward_),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": _Curve(
        lambda x, alpha, out: torch.clamp(x, min=0, out=out),
        lambda grad, x, alpha: grad.masked_fill_(x <= 0, 0),
    ),
    "relu2": _Curve(
        lambda x, alpha, out: torch.clamp(x, min=0, out=out).square_(),
        lambda grad, x, alpha: grad.mul_(x.clamp(min=0).mul_(2)),
    ),
    "situ": _Curve(
        lambda x, alpha, out: torch.mul(alpha * torch.tanh(x / alpha), _logistic(x), out=out),
        _situ_backward_,
    ),
}
_INVARIANT = _CURVES | {
    "sigmoid": _Curve(lambda x, alpha, out: torch.mul(x, _logistic(alpha * x), out=out), _logistic_backward_),
    "gelu": _Curve(lambda x, alpha, out: torch.mul(x, _normal(x), out=out), _normal_backward_),
    "gelu_tanh": _Curve(lambda x, alpha, out: torch.mul(x, _normal_by_tanh(x), out=out), _normal_by_tanh_backward_),
}
