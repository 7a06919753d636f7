"""Benchmarks of one pass by itself: ways to run it, checked against float64 and then timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmlp
from bench.cpu.layers import Layer
from bench.oracle.tolerance import Errors
from fusedmlp.environment import triton_interpret

Results = dict[str, Tensor]


class Way(NamedTuple):
    """One way to run a pass: `run(layer, *operands)` returns results by name, or leaves them in main_grad."""

    name: str
    run: Callable[..., Any]
    missing: Callable[[str], str] = lambda _: ""  # by device; empty: it can run
    overwrites: bool = False  # main_grad, to which other ways add


def _run(layer: Layer, way: Way, *operands: Tensor) -> Results:
    return way.run(layer, *operands)


class Pass(NamedTuple):
    """A pass with the operands that every way gets, and reference results in the arithmetic of a dtype."""

    what: str
    operands: Callable[[Layer], tuple[Tensor, ...]]
    reference: Callable[..., Results]  # (layer, dtype, *operands)
    ways: tuple[Way, ...]
    results: Callable[..., Results] = _run  # (layer, way, *operands)


def check(one: Pass, layer: Layer, way: Way) -> Errors:
    """Compare a way's results with float64; raise if any is wrong."""
    operands, errors = one.operands(layer), Errors(layer.dtype)
    right, low = (one.reference(layer, dtype, *operands) for dtype in (torch.float64, layer.dtype))
    for name, actual in one.results(layer, way, *operands).items():
        errors.add(name, actual, right[name], low[name])
    errors.verify(f"{way.name} on {layer}")
    return errors


@torch.no_grad()
def bench(one: Pass, layer: Layer, way: Way, record: Callable[..., None], require: Callable[..., None]) -> None:
    """Check a way and time it, or say why it cannot run here."""
    require(f"{way.name}, {one.what}" if way.name == "fusedmlp" else way.name, way.missing)
    errors = check(one, layer, way)
    run = partial(way.run, layer, *one.operands(layer))
    worst = max(errors.relative().values())
    record(layer, one.what, way.name, run, lambda: None, error=worst, allowed=errors.allowed())


def normal(layer: Layer, columns: int) -> Tensor:
    """The same random rows for every way, `[R, columns]`."""
    torch.manual_seed(1)
    return torch.randn(layer.shape.R, columns, device=layer.device).to(layer.dtype)


def offsets(layer: Layer) -> Tensor:
    """The first row of every expert, then the end of the last: `[E + 1]`."""
    return F.pad(layer.ends, (1, 0))


def probs_of(layer: Layer, dtype: torch.dtype) -> Tensor:
    """Routing probabilities for arithmetic in a dtype: those of 16-bit layers stay fp32."""
    return layer.probs_R.detach().to(torch.promote_types(dtype, torch.float32))


def swiglu(h_RG: Tensor, probs_R: Tensor) -> Tensor:
    """`silu(gate) * linear * probs`, in the dtype of `h`."""
    gate, linear = h_RG.chunk(2, dim=-1)
    return (F.silu(gate) * linear * probs_R.unsqueeze(1)).to(h_RG.dtype)


def implementation(layer: Layer) -> str:
    """The operators' implementation for the layer's device."""
    return "torch" if layer.device == "cpu" and not triton_interpret() else "triton"


def needs_triton(device: str) -> str:
    """Why a pass without an operator of its own cannot run: PyTorch's implementation has it only inside the layer's."""
    return "needs a GPU, or TRITON_INTERPRET=1" if device == "cpu" and not triton_interpret() else ""


def swiglu_options() -> object:
    """The kernels' options for swiglu."""
    from fusedmlp.operators.triton_impl import act_options

    return act_options(fusedmlp.Activation("swiglu").encoded)
