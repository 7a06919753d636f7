"""The oracle: a grouped MLP in plain autograd, one expert at a time, in any dtype; shares no code with the library.

R: rows, E: experts, H: hidden size, F: ffn size, G: outputs of fc1, `2 * F` or `F`. Weights are `[out, in]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS, OF_ROWS = ("fc1", "fc2"), ("y", "dx", "dprobs")


def activate(
    name: str,
    h: Tensor,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    linear_offset: float = 0.0,
    linear_scale: float | None = None,
) -> Tensor:
    """The activation of `h` `[R, G]`, as `Activation` names and describes it."""

    def sigmoid_curve(default: float) -> Callable[[Tensor], Tensor]:
        scale = default if alpha is None else alpha
        return lambda t: t * torch.sigmoid(scale * t)

    def bounded(t: Tensor, bound: float) -> Tensor:
        return bound * torch.tanh(t / bound)

    gated: dict[str, Callable[[Tensor], Tensor]] = {
        "swiglu": sigmoid_curve(1.0),
        "quick_geglu": sigmoid_curve(1.702),
        "geglu": lambda t: 0.5 * t * (1 + torch.erf(t / math.sqrt(2))),
        "geglu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "reglu": F.relu,
        "situ_glu": lambda t: bounded(t, alpha or 4.0) * torch.sigmoid(t),
    }
    ungated: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": sigmoid_curve(1.0),
        "quick_gelu": sigmoid_curve(1.702),
        "gelu": lambda t: 0.5 * t * (1 + torch.erf(t / math.sqrt(2))),
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda t: F.relu(t) ** 2,
    }
    if name in ungated:
        return ungated[name](h)
    if interleaved:
        gate, linear = h[:, 0::2], h[:, 1::2]
    else:
        half = h.shape[1] // 2
        gate, linear = h[:, :half], h[:, half:]
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(min=-limit, max=limit)
    if name == "situ_glu":
        linear = bounded(linear, linear_scale or 25.0)
    return gated[name](gate) * (linear + linear_offset)


def gemm(x: Tensor, weights: Iterable[Tensor], counts: Sequence[int]) -> Tensor:
    """The rows of each expert times its weight, `[sum(counts), out]`; `x` may have padding rows."""
    return torch.cat([x_e @ w.T for x_e, w in zip(_split(x, counts), weights, strict=True)])


def wgrad(dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """`dy^T x` of each expert, `[E, out, in]`."""
    return torch.stack([dy_e.T @ x_e for dy_e, x_e in zip(_split(dy, counts), _split(x, counts), strict=True)])


def _split(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = rows[: sum(counts)].split(list(counts))
    return parts


class Forward(NamedTuple):
    """Results of one expert's forward."""

    h: Tensor  # [R, G], of fc1
    a: Tensor  # [R, F], of the activation
    y: Tensor  # [R, H]


def expert(
    x: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    probs: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str = "swiglu",
    probs_before_fc2: bool = False,
    **options: Any,
) -> Forward:
    """One expert: x `[R, H]`, fc1 `[G, H]`, fc2 `[H, F]`, probs `[R]`, biases `[G]`, `[H]`; `options` of `activate`.

    With `probs_before_fc2` the operand of fc2 is `a * probs`: the same result, rounded elsewhere.
    """
    h = x @ fc1.T
    if bias1 is not None:
        h = h + bias1
    a = activate(activation, h, **options)
    early, late = (probs, None) if probs_before_fc2 else (None, probs)
    y = _scaled(a, early) @ fc2.T
    if bias2 is not None:
        y = y + _scaled(bias2.expand_as(y), early)
    return Forward(h, a, _scaled(y, late))


def _scaled(t: Tensor, probs: Tensor | None) -> Tensor:
    return t if probs is None else (t * probs.unsqueeze(1)).to(t.dtype)


def rows(
    x: Tensor,
    fc1: Iterable[Tensor],
    fc2: Iterable[Tensor],
    counts: Sequence[int],
    probs: Tensor | None = None,
    bias1: Iterable[Tensor] | None = None,
    bias2: Iterable[Tensor] | None = None,
    *,
    activation: str = "swiglu",
    **options: Any,
) -> Tensor:
    """`y` of the rows of all experts, for autograd: `[sum(counts), H]`; `x` and `probs` may have padding rows."""
    none = [None] * len(counts)
    of_rows = _split(x, counts), none if probs is None else _split(probs, counts)
    of_experts = fc1, fc2, none if bias1 is None else bias1, none if bias2 is None else bias2
    ys = []
    for x_e, probs_e, fc1_e, fc2_e, bias1_e, bias2_e in zip(*of_rows, *of_experts, strict=True):
        ys.append(expert(x_e, fc1_e, fc2_e, probs_e, bias1_e, bias2_e, activation=activation, **options).y)
    return torch.cat(ys)


def expert_step(
    tensors: Mapping[str, Tensor],
    dy: Tensor,
    dtype: torch.dtype,
    *,
    magnitudes: dict[str, Tensor] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Forward and backward of one expert, computed in `dtype`: `y`, and `d<name>` of each of `tensors`.

    `tensors` and `options` are arguments of `expert`. Into `magnitudes` goes what `tolerance.Errors` takes: the largest
    of each result, computed from the magnitudes of its terms.
    """
    leaf = {name: t.detach().to(dtype, copy=True).requires_grad_() for name, t in tensors.items()}
    optional = (leaf.get(name) for name in ("probs", "bias1", "bias2"))
    h, a, y = expert(leaf["x"], leaf["fc1"], leaf["fc2"], *optional, **options)
    h.retain_grad()
    dy = dy.to(dtype)
    y.backward(dy)
    if magnitudes is not None:
        assert h.grad is not None
        with torch.no_grad():
            of_terms = _magnitudes(leaf, h.grad.abs(), a.abs(), dy.abs())
        for name, result in of_terms.items():
            if result.numel():
                magnitudes[name] = max(magnitudes.get(name, result.new_zeros(())), result.max())
    grads = {f"d{name}": torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaf.items()}
    return {"y": y.detach(), **grads}


def _magnitudes(leaf: dict[str, Tensor], dh: Tensor, a: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The results of a step from the magnitudes of their terms; `dh`, `a` and `dy` are magnitudes, too."""
    probs = leaf["probs"].abs().unsqueeze(1) if "probs" in leaf else dy.new_ones(())
    terms = a @ leaf["fc2"].abs().T + (leaf["bias2"].abs() if "bias2" in leaf else 0)
    return {
        "y": terms * probs,
        "dx": dh @ leaf["fc1"].abs(),
        "dprobs": (dy * terms).sum(1),
        "dfc1": dh.T @ leaf["x"].abs(),
        "dfc2": (dy * probs).T @ a,
        "dbias1": dh.sum(0),
        "dbias2": (dy * probs).sum(0),
    }


def grouped_mlp(
    tensors: Mapping[str, Tensor],
    counts: Sequence[int],
    dy: Tensor,
    dtype: torch.dtype,
    *,
    layout: str = "out_in",
    before: float = 0.0,
    magnitudes: dict[str, Tensor] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Forward and backward of all experts, computed in `dtype`: float64 tensors by the names of `expert_step`.

    Rows after those of experts are padding: their `y`, `dx` and `dprobs` are zero. `layout` is that of the weights and
    of their gradients, which are added to `before`, as to a `main_grad`.
    """
    of_rows = {name: _split(tensors[name], counts) for name in ("x", "probs") if name in tensors}
    steps = []
    for e, dy_e in enumerate(_split(dy, counts)):
        mine = {name: of_rows[name][e] if name in of_rows else t[e] for name, t in tensors.items()}
        if layout == "in_out":
            mine |= {name: mine[name].T for name in WEIGHTS}
        steps.append(expert_step(mine, dy_e, dtype, magnitudes=magnitudes, **options))
    results = {}
    for name in steps[0]:
        parts = [step[name].double() for step in steps]
        if name in OF_ROWS:
            padding = len(tensors["x"]) - sum(counts)
            results[name] = torch.cat([*parts, parts[0].new_zeros(padding, *parts[0].shape[1:])])
        else:
            results[name] = torch.stack(parts)
    for name in WEIGHTS:
        grad = results[f"d{name}"] + before
        results[f"d{name}"] = grad.mT if layout == "in_out" else grad
        if magnitudes is not None:
            magnitudes[f"d{name}"] = magnitudes[f"d{name}"] + before
    return results
