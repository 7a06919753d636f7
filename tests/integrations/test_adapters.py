"""PEFT's adapters and Accelerate's offloading on `fc1` and `fc2` of a `GroupedMLP`, beside calls of its parts."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn

import fusedmlp

COUNTS = [2, 0, 4]


class Model(nn.Module):
    def __init__(self, packed, fused):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.fused = nn.Linear(8, 8), fused
        self.experts = fusedmlp.GroupedMLP(3, 8, 6, packed=packed)

    def forward(self, x):
        x = self.first(x)
        if self.fused:
            return self.experts(x, COUNTS)
        gate, linear = self.experts.fc1(x, COUNTS).chunk(2, -1)
        return self.experts.fc2(nn.functional.silu(gate) * linear, COUNTS)


def adapted(packed, fused, targets, buffer):
    """Results with the adapter, its gradients in two steps, and results without it and merged."""
    names = targets if packed else [f"{target}{e}" for target in targets for e in range(3)]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=[f"experts.{name}" for name in names])
    model = get_peft_model(Model(packed, fused), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(1)
    for p in trained:
        nn.init.normal_(p, std=0.3)
    optimizer = torch.optim.SGD(trained, 0.05)
    if buffer:
        fusedmlp.MainGradBuffer(trained)
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        y = model(torch.randn(6, 8))
        y.square().sum().backward()
        results += [y.detach(), *(p.grad.clone() for p in trained)]
        optimizer.step()
    x = torch.randn(6, 8)
    with torch.no_grad():
        results.append(model(x))
        with model.disable_adapter():
            results.append(model(x))
        return [*results, model.merge_and_unload()(x)]


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("targets", [["fc1.weight"], ["fc1.weight", "fc2.weight"]], ids="+".join)
def test_lora_on_the_weights_of_experts_has_its_effect(targets, packed, buffer):
    actual, expected = (adapted(packed, fused, targets, buffer) for fused in (True, False))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_offloaded_weights_come_back_for_forward(packed):
    experts, x = fusedmlp.GroupedMLP(3, 8, 6, packed=packed, bias=True), torch.randn(6, 8)
    offloaded = copy.deepcopy(experts)
    cpu_offload(offloaded, execution_device="cpu")
    assert all(p.is_meta for p in offloaded.parameters())
    with torch.no_grad():
        assert torch.equal(offloaded(x, COUNTS), experts(x, COUNTS))
    assert all(p.is_meta for p in offloaded.parameters())
