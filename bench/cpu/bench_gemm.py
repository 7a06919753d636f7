"""The GEMM of fc2 alone: fusedmlp beside its peers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cpu import passes
from bench.cpu.layers import Layer
from bench.cpu.passes import Pass, Results, Way
from bench.oracle import reference
from fusedmlp.operators import ops


def _operands(layer: Layer) -> tuple[Tensor]:
    return (passes.normal(layer, layer.shape.F),)


def _reference(layer: Layer, dtype: torch.dtype, a_RF: Tensor) -> Results:
    return {"y": reference.gemm(a_RF.to(dtype), layer.fc2.detach().to(dtype), layer.rows)}


def _fused(layer: Layer, a_RF: Tensor) -> Results:
    fc2 = [layer.fc2.detach()]
    return {"y": ops.grouped_gemm(a_RF, fc2, [], passes.offsets(layer), "", False, passes.implementation(layer))}


def _grouped_mm(layer: Layer, a_RF: Tensor) -> Results:
    return {"y": F.grouped_mm(a_RF, layer.fc2.detach().mT, offs=layer.ends)}


def _loop(layer: Layer, a_RF: Tensor) -> Results:
    return _reference(layer, layer.dtype, a_RF)


PASS = Pass(
    "gemm of fc2",
    _operands,
    _reference,
    (Way("fusedmlp", _fused), Way("grouped_mm", _grouped_mm), Way("loop over experts", _loop)),
)


@pytest.mark.parametrize("way", PASS.ways, ids=lambda way: way.name)
def test_gemm(layer, way, record, require):
    passes.bench(PASS, layer, way, record, require)
