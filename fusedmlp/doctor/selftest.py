"""A small layer, forward and backward into `main_grad`, beside a loop over its experts in float64.

The step runs as it is, under activation checkpointing, and compiled by inductor: PyTorch has broken each by itself.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.doctor import reference, tolerance

_COUNTS, _PADDING, _H, _F = (70, 0, 1, 57), 3, 64, 48

STEPS = ("plain", "checkpointed", "compiled")


@dataclass(frozen=True)
class Check:
    """One result of the self-test; right if `error` is at most `allowed`, both relative to its largest value."""

    implementation: str
    device: str
    dtype: str
    step: str  # of STEPS
    result: str
    error: float
    allowed: float
    raised: str = ""  # instead of any result
    not_run: str = ""  # why, if this machine lacks something that the step needs

    @property
    def ok(self) -> bool:
        """Whether it is right, or was not run; NaN is not right."""
        return bool(self.not_run) or self.error <= self.allowed


def run(dtype: torch.dtype, steps: Sequence[str] = STEPS) -> tuple[list[Check], float]:
    """Every step of `dtype`, and the plain one of float32, by every implementation that runs here; the checks, and the
    seconds that they took.
    """
    start = time.perf_counter()
    where = [("torch", "cpu")]
    if torch.cuda.is_available():
        where.append(("triton", "cuda"))
    elif fusedmlp.environment.triton_interpret():
        where.append(("triton", "cpu"))
    checks = []
    for impl, device in where:
        for each, step in dict.fromkeys([(torch.float32, "plain"), *((dtype, step) for step in steps)]):
            checks += _check(impl, device, each, step)
    return checks, time.perf_counter() - start


def _check(impl: str, device: str, dtype: torch.dtype, step: str) -> list[Check]:
    what = impl, device, str(dtype).removeprefix("torch."), step
    if step == "compiled" and (missing := _no_compiler()):
        return [Check(*what, "all", 0.0, 0.0, not_run=missing)]
    try:
        found = _compare(impl, device, dtype, step)
    except Exception as error:  # a report on what is broken comes to its end
        first = (str(error).splitlines() or [""])[0]
        return [Check(*what, "all", math.nan, 0.0, raised=f"{type(error).__name__}: {first}")]
    return [Check(*what, *each) for each in found]


def _no_compiler() -> str:
    """The tool that inductor lacks here; empty if it can compile."""
    name = os.environ.get("CXX", "g++")
    return "" if shutil.which(name) else f"torch.compile needs a C++ compiler; there is no {name} (CXX names another)"


def _compare(impl: str, device: str, dtype: torch.dtype, step: str) -> list[tuple[str, float, float]]:
    """Name, error and allowed error of each result."""
    inputs = _inputs(dtype)
    tensors = {name: tensor for name, tensor in inputs.items() if name != "dy"}
    expected, plain = (
        reference.grouped_mlp(tensors, _COUNTS, inputs["dy"], precision, before=1.0)
        for precision in (torch.float64, dtype)
    )
    errors = tolerance.errors_of(_fused(inputs, impl, device, step), expected, plain, dtype)
    return [(name, error, errors.allowed()) for name, error in errors.relative().items()]


def _inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    E, R = len(_COUNTS), sum(_COUNTS)
    shapes = {
        "x": (R, _H),
        "dy": (R, _H),
        "fc1": (E, 2 * _F, _H),
        "fc2": (E, _H, _F),
        "bias1": (E, 2 * _F),
        "bias2": (E, _H),
    }
    inputs = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return inputs | {"probs": torch.rand(R, generator=generator)}


def _fused(inputs: dict[str, Tensor], impl: str, device: str, step: str) -> dict[str, Tensor]:
    """The library, with padding rows that hold NaN; the same keys, without the padding."""

    def padded(tensor: Tensor) -> Tensor:
        nan = tensor.new_full((_PADDING, *tensor.shape[1:]), float("nan"))
        return torch.cat([tensor, nan]).to(device)

    x, probs = padded(inputs["x"]).requires_grad_(), padded(inputs["probs"]).requires_grad_()
    fc1, fc2, b1, b2 = (Parameter(inputs[name].to(device)) for name in ("fc1", "fc2", "bias1", "bias2"))
    for weight in (fc1, fc2):
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    counts = torch.tensor(_COUNTS, device=device)

    def forward(x: Tensor, probs: Tensor) -> Tensor:
        return fusedmlp.grouped_mlp(x, fc1, fc2, counts, probs=probs, fc1_bias=b1, fc2_bias=b2, impl=impl)

    y = _as_step(forward, step)(x, probs)
    y.backward(padded(inputs["dy"]))
    R = len(inputs["x"])
    results = {"y": y[:R], "dx": x.grad[:R], "dprobs": probs.grad[:R], "dbias1": b1.grad, "dbias2": b2.grad}  # type: ignore[index]
    for name, weight in (("dfc1", fc1), ("dfc2", fc2)):
        fused = weight.grad_added_to_main_grad and not weight.grad.any()  # type: ignore[attr-defined, union-attr]
        results[name] = weight.main_grad if fused else torch.full_like(weight, float("nan"))  # type: ignore[attr-defined]
    return {name: tensor.detach().cpu().double() for name, tensor in results.items()}  # type: ignore[union-attr]


def _as_step(forward: Callable[..., Tensor], step: str) -> Callable[..., Tensor]:
    if step == "compiled":
        return torch.compile(forward, fullgraph=not fusedmlp.versions.compiler_problem())
    if step == "checkpointed":
        return lambda *args: checkpoint(forward, *args, use_reentrant=False)
    return forward
