"""The weight gradient of fc1 alone, into fp32 `main_grad`: fusedmlp beside its peers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cpu import passes
from bench.cpu.layers import Layer
from bench.cpu.passes import Pass, Results, Way
from bench.cpu.peers import needs
from bench.oracle import reference
from fusedmlp.operators import ops


def _operands(layer: Layer) -> tuple[Tensor, Tensor]:
    return passes.normal(layer, 2 * layer.shape.F), layer.x_RH.detach()


def _reference(layer: Layer, dtype: torch.dtype, dh_RG: Tensor, x_RH: Tensor) -> Results:
    return {"dfc1": reference.wgrad(dh_RG.to(dtype), x_RH.to(dtype), layer.rows)}


def _results(layer: Layer, way: Way, dh_RG: Tensor, x_RH: Tensor) -> Results:
    """Results of two runs, which show a way that overwrites where it should add."""
    layer.zero()
    for _ in range(2):
        way.run(layer, dh_RG, x_RH)
    return {"dfc1": layer.fc1.main_grad / (1 if way.overwrites else 2)}


def _fused(layer: Layer, dh_RG: Tensor, x_RH: Tensor, accumulate: bool = True) -> None:
    operands = [dh_RG], [x_RH], [passes.offsets(layer)]
    ops.grouped_wgrad_([layer.fc1.main_grad], [], *operands, [], [], accumulate, "", passes.implementation(layer))


def _overwriting(layer: Layer, dh_RG: Tensor, x_RH: Tensor) -> None:
    _fused(layer, dh_RG, x_RH, accumulate=False)


def _grouped_mm(layer: Layer, dh_RG: Tensor, x_RH: Tensor) -> None:
    layer.fc1.main_grad.add_(F.grouped_mm(dh_RG.T, x_RH, offs=layer.ends))


def _loop(layer: Layer, dh_RG: Tensor, x_RH: Tensor) -> None:
    for main_grad, dh, x in zip(layer.fc1.main_grad, dh_RG.split(layer.rows), x_RH.split(layer.rows), strict=True):
        main_grad.add_(dh.T @ x)


def _quack(layer: Layer, dh_RG: Tensor, x_RH: Tensor) -> None:
    from quack.gemm_interface import gemm_add_inplace

    gemm_add_inplace(dh_RG.T, x_RH, layer.fc1.main_grad, cu_seqlens_k=passes.offsets(layer))


PASS = Pass(
    "wgrad of fc1",
    _operands,
    _reference,
    (
        Way("fusedmlp", _fused),
        Way("fusedmlp, overwriting", _overwriting, overwrites=True),
        Way("grouped_mm", _grouped_mm),
        Way("loop over experts", _loop),
        Way("QuACK", _quack, needs("quack")),
    ),
    _results,
)


@pytest.mark.parametrize("way", PASS.ways, ids=lambda way: way.name)
def test_wgrad(layer, way, record, require):
    passes.bench(PASS, layer, way, record, require)
