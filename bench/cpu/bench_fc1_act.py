"""fc1 and its activation alone, with the output of fc1 kept for backward: fusedmlp beside its peers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cpu import passes
from bench.cpu.layers import Layer
from bench.cpu.passes import Pass, Results, Way
from bench.oracle import reference


def _operands(layer: Layer) -> tuple[Tensor]:
    return (layer.x_RH.detach(),)


def _reference(layer: Layer, dtype: torch.dtype, x_RH: Tensor) -> Results:
    h = reference.gemm(x_RH.to(dtype), layer.fc1.detach().to(dtype), layer.rows)
    return {"h": h, "a": passes.swiglu(h, passes.probs_of(layer, dtype))}


def _fused(layer: Layer, x_RH: Tensor) -> Results:
    from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
    from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
    from fusedmlp.kernels.routing.plan import Schedule

    shape = layer.shape
    h, a = (x_RH.new_empty(shape.R, columns) for columns in (2 * shape.F, shape.F))
    tiles = Schedule(passes.offsets(layer), shape.R)
    fc1 = ExpertTensors.of([layer.fc1.detach()], 2)
    grouped_fc1_act_(h, a, x_RH, fc1, tiles, passes.swiglu_options(), probs_R=layer.probs_R.detach())
    return {"h": h, "a": a}


def _grouped_mm(layer: Layer, x_RH: Tensor) -> Results:
    h = F.grouped_mm(x_RH, layer.fc1.detach().mT, offs=layer.ends)
    return {"h": h, "a": passes.swiglu(h, layer.probs_R.detach())}


def _loop(layer: Layer, x_RH: Tensor) -> Results:
    return _reference(layer, layer.dtype, x_RH)


PASS = Pass(
    "fc1_act",
    _operands,
    _reference,
    (
        Way("fusedmlp", _fused, passes.needs_triton),
        Way("grouped_mm", _grouped_mm),
        Way("loop over experts", _loop),
    ),
)


@pytest.mark.parametrize("way", PASS.ways, ids=lambda way: way.name)
def test_fc1_act(layer, way, record, require):
    passes.bench(PASS, layer, way, record, require)
