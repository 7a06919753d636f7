"""The backward of fc2 and of the activation alone, weight gradients left out: fusedmlp beside its peers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cpu import passes
from bench.cpu.layers import Layer
from bench.cpu.passes import Pass, Results, Way
from bench.oracle import reference


def _operands(layer: Layer) -> tuple[Tensor, Tensor]:
    return layer.dy_RH, passes.normal(layer, 2 * layer.shape.F)


def _activation_backward(da_RF: Tensor, h_RG: Tensor, probs_R: Tensor) -> Results:
    """Backward of the activation from the gradient of `a`; computes `a` again, as fusedmlp does."""
    with torch.enable_grad():
        h, probs = h_RG.detach().requires_grad_(), probs_R.detach().requires_grad_()
        a = passes.swiglu(h, probs)
        a.backward(da_RF)
    return {"dh": h.grad, "a": a.detach(), "dprobs": probs.grad}


def _reference(layer: Layer, dtype: torch.dtype, dy_RH: Tensor, h_RG: Tensor) -> Results:
    da = reference.gemm(dy_RH.to(dtype), layer.fc2.detach().to(dtype).mT, layer.rows)
    return _activation_backward(da, h_RG.to(dtype), passes.probs_of(layer, dtype))


def _fused(layer: Layer, dy_RH: Tensor, h_RG: Tensor) -> Results:
    from fusedmlp.kernels.dgrad_act.launch import grouped_dgrad_act_
    from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
    from fusedmlp.kernels.routing.plan import Schedule

    dh, a = torch.empty_like(h_RG), h_RG.new_empty(layer.shape.R, layer.shape.F)
    tiles = Schedule(passes.offsets(layer), layer.shape.R)
    fc2 = ExpertTensors.of([layer.fc2.detach()], 2)
    partial = grouped_dgrad_act_(
        dh, a, dy_RH, h_RG, fc2, tiles, passes.swiglu_options(), probs_R=layer.probs_R.detach()
    )
    return {"dh": dh, "a": a, "dprobs": partial.sum(0)}


def _grouped_mm(layer: Layer, dy_RH: Tensor, h_RG: Tensor) -> Results:
    return _activation_backward(F.grouped_mm(dy_RH, layer.fc2.detach(), offs=layer.ends), h_RG, layer.probs_R)


def _loop(layer: Layer, dy_RH: Tensor, h_RG: Tensor) -> Results:
    return _reference(layer, layer.dtype, dy_RH, h_RG)


PASS = Pass(
    "dgrad_act",
    _operands,
    _reference,
    (
        Way("fusedmlp", _fused, passes.needs_triton),
        Way("grouped_mm", _grouped_mm),
        Way("loop over experts", _loop),
    ),
)


@pytest.mark.parametrize("way", PASS.ways, ids=lambda way: way.name)
def test_dgrad_act(layer, way, record, require):
    passes.bench(PASS, layer, way, record, require)
