"""A small layer, forward and backward into `main_grad`, beside a loop over its experts in float64.

The step runs as it is, under activation checkpointing, and compiled by inductor: a version of PyTorch can break any one
of the three alone.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fusedmlp

STEPS = ("plain", "checkpointed", "compiled")
_WEIGHTS = ("fc1", "fc2", "bias1", "bias2")
_COUNTS, _PADDING, _H, _F = (70, 0, 1, 57), 3, 64, 48
# A gradient passes four stages (GEMM, activation, its derivative, GEMM), and each rounds by up to eps / 2.
_ROUNDING = 4 / 2  # in units of eps


def run(dtype: torch.dtype, steps: Sequence[str] = STEPS) -> list[dict[str, Any]]:
    """Every step of `dtype`, and the plain one of float32, by every implementation that runs here.

    Errors of a step's results, and the error that is `allowed`, are relative to a result's largest value. `note` has
    the worst, what was raised instead, or why the step was not run.
    """
    where = [("torch", "cpu")]
    if torch.cuda.is_available() or fusedmlp.environment.triton_interpret():
        where.append(("triton", "cuda" if torch.cuda.is_available() else "cpu"))
    what = dict.fromkeys([(torch.float32, "plain"), *((dtype, step) for step in steps)])
    return [_check(*here, *each) for here, each in product(where, what)]


def _check(impl: str, device: str, dtype: torch.dtype, step: str) -> dict[str, Any]:
    check: dict[str, Any] = {"implementation": impl, "device": device, "dtype": str(dtype).removeprefix("torch.")}
    check |= {"step": step, "ok": False, "errors": {}, "allowed": 0.0}
    compiler = os.environ.get("CXX", "g++")
    if step == "compiled" and not shutil.which(compiler):
        missing = f"torch.compile needs a C++ compiler; there is no {compiler} (CXX names another)"
        return check | {"ok": True, "note": f"not run: {missing}"}
    inputs = _inputs(dtype)
    exact, plain = (_reference(*inputs, precision) for precision in (torch.float64, dtype))
    try:
        fused = _fused(*inputs, impl, device, step)
    except Exception as error:  # a report on what is broken comes to its end
        return check | {"note": f"{type(error).__name__}: {error}".splitlines()[0]}

    def errors(results: dict[str, Tensor]) -> dict[str, float]:
        return {name: float((results[name] - t).abs().max() / t.abs().max()) for name, t in exact.items()}

    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"  # has as many bits as fp16
    band = _ROUNDING * torch.finfo(torch.float16 if tf32 else dtype).eps
    ours, allowed = errors(fused), 2 * (max(errors(plain).values()) + band)
    wrong = [name for name, error in ours.items() if not error <= allowed]  # NaN is wrong
    shown = ", ".join(f"{name}: error {ours[name]:.1e}" for name in wrong or [max(ours, key=ours.__getitem__)])
    return check | {"ok": not wrong, "errors": ours, "allowed": allowed, "note": f"{shown}, allowed {allowed:.1e}"}


def _inputs(dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves of the step, and the gradient of its output; rows after those of experts are padding, which holds NaN."""
    generator = torch.Generator().manual_seed(0)
    E, R = len(_COUNTS), sum(_COUNTS) + _PADDING
    shapes = {"x": (R, _H), "fc1": (E, 2 * _F, _H), "fc2": (E, _H, _F), "bias1": (E, 2 * _F), "bias2": (E, _H)}
    inputs = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    inputs["probs"], dy = torch.rand(R, generator=generator), torch.randn(R, _H, generator=generator).to(dtype)
    for rows in (inputs["x"], inputs["probs"], dy):
        rows[-_PADDING:] = math.nan
    return inputs, dy


def _reference(inputs: dict[str, Tensor], dy: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results by plain autograd in `dtype`, one expert at a time; gradients of weights are added to 1."""
    leaves: dict[str, Any] = {name: Parameter(tensor.to(dtype)) for name, tensor in inputs.items()}
    of_rows = (leaves[name].split((*_COUNTS, _PADDING))[:-1] for name in ("x", "probs"))
    ys = []
    for x, probs, fc1, fc2, *biases in zip(*of_rows, *(leaves[name] for name in _WEIGHTS), strict=True):
        gate, linear = (x @ fc1.T + biases[0]).chunk(2, dim=1)
        ys.append(((gate * torch.sigmoid(gate) * linear) @ fc2.T + biases[1]) * probs.unsqueeze(1))
    y = torch.cat([*ys, ys[0].new_zeros(_PADDING, _H)])
    y.backward(dy.to(dtype))
    results = {"y": y.detach().double()} | {f"d{name}": leaf.grad.double() for name, leaf in leaves.items()}
    return results | {name: results[name] + 1 for name in ("dfc1", "dfc2")}


def _fused(inputs: dict[str, Tensor], dy: Tensor, impl: str, device: str, step: str) -> dict[str, Tensor]:
    """The library's results; NaN for a weight gradient that is not fused."""
    leaves: dict[str, Any] = {name: Parameter(tensor.to(device)) for name, tensor in inputs.items()}
    fc1, fc2, bias1, bias2 = (leaves[name] for name in _WEIGHTS)
    for weight in (fc1, fc2):
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    counts = torch.tensor(_COUNTS, device=device)

    def layer(x: Tensor, probs: Tensor) -> Tensor:
        return fusedmlp.grouped_mlp(x, fc1, fc2, counts, probs=probs, fc1_bias=bias1, fc2_bias=bias2, impl=impl)

    forward: Callable[..., Tensor] = layer
    if step == "compiled":
        forward = torch.compile(layer, fullgraph=not fusedmlp.versions.compiler_problem())
    elif step == "checkpointed":
        forward = partial(checkpoint, layer, use_reentrant=False)
    y = forward(leaves["x"], leaves["probs"])
    y.backward(dy.to(device))
    results = {"y": y.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    for name, weight in (("dfc1", fc1), ("dfc2", fc2)):
        fused = weight.grad_added_to_main_grad and not weight.grad.any()
        results[name] = weight.main_grad if fused else torch.full_like(weight, math.nan)
    return {name: result.cpu().double() for name, result in results.items()}
