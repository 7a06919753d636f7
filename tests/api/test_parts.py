"""Hooks, adapters and parametrizations on `fc1` or `fc2` of a `GroupedMLP`: effective, or refused by the name."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from fusedmlp import GroupedLinear, GroupedMLP, grouped_linear
from fusedmlp.parts import ExpertTensors

EXPERTS, COUNTS, SIZES = 2, [4, 3], {"fc1": (6, 10), "fc2": (5, 6)}


def by_rows(mlp, x):
    return mlp(x, COUNTS)


def by_tokens(mlp, x):
    index = torch.arange(EXPERTS).repeat_interleave(torch.tensor(COUNTS))[:, None]
    return mlp.forward_tokens(x, index, torch.ones(len(x), 1))


def by_parts(mlp, x):
    """The layer, by calls of its parts with rows."""
    gate, linear = mlp.fc1(x, COUNTS).chunk(2, -1)
    return mlp.fc2(nn.functional.silu(gate) * linear, COUNTS)


def on_weights(function):
    def put(mlp, name):
        layer = getattr(mlp, name)
        for weight in [n for n, _ in layer.named_parameters() if n.startswith("weight")]:
            function(layer, weight)

    return put


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Wrapper(nn.Module):
    """Computes another weight while it calls the layer, as PEFT's `target_parameters` does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *args, **kwargs):
        names = [name for name, _ in self.layer.named_parameters(recurse=False)]
        for name in names:
            nn.utils.parametrize.register_parametrization(self.layer, name, Twice())
        result = self.layer(x, *args, **kwargs)
        for name in names:
            nn.utils.parametrize.remove_parametrizations(self.layer, name, leave_parametrized=False)
        return result


def observed(mlp, name):
    getattr(mlp, name).register_forward_hook(lambda layer, args, tensors: None)


def moved(mlp, name):
    """A hook that returns the tensors in a new tuple, as Accelerate's offloading does."""
    getattr(mlp, name).register_forward_hook(
        lambda layer, args, found: type(found)(*found) if isinstance(found, ExpertTensors) else None
    )


EFFECTIVE = {
    "prune": on_weights(lambda layer, weight: prune.l1_unstructured(layer, weight, 0.5)),
    "older spectral_norm": on_weights(spectral_norm),
    "parametrizations.weight_norm": on_weights(parametrizations.weight_norm),
    "a wrapper that computes weights": lambda mlp, name: setattr(mlp, name, Wrapper(getattr(mlp, name))),
    "a forward hook that looks": observed,
    "a forward hook that moves": moved,
}


def trained(put, name, packed, call):
    """Outputs and gradients of two steps, each of which changes the weights."""
    torch.manual_seed(0)
    mlp = GroupedMLP(EXPERTS, 6, 5, packed=packed)
    put(mlp, name)
    optimizer = torch.optim.SGD(mlp.parameters(), 0.5)
    results = []
    for _ in range(2):
        x = torch.randn(sum(COUNTS), 6, requires_grad=True)
        optimizer.zero_grad()
        y = call(mlp, x)
        y.square().sum().backward()
        results += [y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())]
        optimizer.step()
    return results


@pytest.mark.parametrize("call", [by_rows, by_tokens])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", EFFECTIVE)
def test_it_has_its_effect(kind, name, packed, call):
    actual, expected = (trained(EFFECTIVE[kind], name, packed, how) for how in (call, by_parts))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class WithLoRA(GroupedLinear):
    def forward(self, x, tokens_per_expert, **kwargs):
        return super().forward(x, tokens_per_expert, **kwargs) + grouped_linear(x, self.weight, tokens_per_expert)


def replaced(mlp, name):
    layer = getattr(mlp, name)
    plain = layer.forward
    layer.forward = lambda *args: 2 * plain(*args)


REFUSED = {
    "a forward hook that edits": lambda layer: layer.register_forward_hook(lambda layer, args, y: 2 * y),
    "a forward hook that edits its parts": lambda layer: layer.register_forward_hook(
        lambda layer, args, y: (2 * y[0],)
    ),
    "a forward pre-hook that wants rows": lambda layer: layer.register_forward_pre_hook(
        lambda layer, args: (2 * args[0], args[1])
    ),
    "a full backward hook": lambda layer: layer.register_full_backward_hook(lambda layer, dx, dy: None),
    "a backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(lambda layer, dy: None),
}


@pytest.mark.parametrize("call", [by_rows, by_tokens])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", [*REFUSED, "another forward", "a subclass", "another class", "within a wrapper"])
def test_it_is_refused_by_name(kind, name, packed, call):
    mlp = GroupedMLP(EXPERTS, 6, 5, packed=packed)
    if kind in REFUSED:
        REFUSED[kind](getattr(mlp, name))
    elif kind == "another forward":
        replaced(mlp, name)
    elif kind == "within a wrapper":
        getattr(mlp, name).register_full_backward_hook(lambda layer, dx, dy: None)
        setattr(mlp, name, Wrapper(getattr(mlp, name)))
    else:
        setattr(mlp, name, WithLoRA(EXPERTS, *SIZES[name]) if kind == "a subclass" else nn.Linear(*SIZES[name]))
    with pytest.raises(TypeError, match=f"^{name}: expected a part that GroupedMLP can call without rows"):
        call(mlp, torch.randn(sum(COUNTS), 6))


def test_a_part_that_is_called_without_rows_returns_its_tensors():
    mlp = GroupedMLP(EXPERTS, 6, 5, packed=False, bias=True)
    weights, biases = mlp.fc1(None, None)
    assert [id(w) for w in weights] == [id(mlp.fc1.weight0), id(mlp.fc1.weight1)]
    assert [id(b) for b in biases] == [id(mlp.fc1.bias0), id(mlp.fc1.bias1)]
    assert GroupedMLP(EXPERTS, 6, 5).fc2(None, None).bias is None
