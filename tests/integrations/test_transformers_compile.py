"""Whole models of Hugging Face Transformers with `experts_implementation="fusedmlp"` in one graph, with a buffer."""

import copy
from types import MethodType

import pytest
import torch
from support import transformers_models as models
from support import transformers_training as training
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.utils import counters

from bench.oracle.tolerance import assert_close
from fusedmlp.integrations.transformers import register

# Dynamo itself instantiates an autograd.Function while it traces one; inductor imports what torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "backend"), [("qwen3_moe", "aot_eager"), ("qwen3_moe", "inductor"), ("gpt_oss", "aot_eager")]
)
def test_every_gradient_of_a_compiled_model(kind, backend, tmp_path, monkeypatch):
    # Inductor's cache on disk does not notice that the Python code of an operator changed.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    eager, model = models.build(kind, "eager"), models.build(kind, "fusedmlp")
    if backend == "inductor":  # half as much to compile
        for each in (eager, model):
            each.model.layers = each.model.layers[:1]
            each.config.num_hidden_layers = 1
    expected, low_precision = models.results(copy.deepcopy(eager).double()), models.results(eager)
    model.compile(fullgraph=True, backend=backend, dynamic=True)
    assert_close(models.results(model, buffered=True), expected, low_precision, torch.float32)
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 2
    for tokens in (16, 22):
        ids, dy = models.batch(tokens)
        model(ids).logits.backward(dy)
    assert counters["stats"]["unique_graphs"] == graphs  # no load compiles again


def test_options_that_change_between_two_calls_of_a_graph():
    """Options of a model are those of its experts; defaults hold for experts without options of their own."""
    one = training.experts("MixtralExperts", experts_implementation="fusedmlp")
    other = copy.deepcopy(one)
    arguments = torch.randn(7, 16), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    torch._dynamo.reset()
    graph, of_other = (torch.compile(e, backend="eager", fullgraph=True, dynamic=True) for e in (one, other))
    model = torch.nn.ModuleList([one])
    model.set_experts_implementation = lambda name: None
    exact = graph(*arguments)
    register(model, recipe="bf16")
    rounded = graph(*arguments)
    assert not torch.equal(rounded, exact)
    assert torch.equal(of_other(*arguments), exact)
    try:
        register(recipe="bf16")
        assert torch.equal(of_other(*arguments), rounded)
        register(model)
        assert torch.equal(graph(*arguments), exact)
    finally:
        register()
    assert torch.equal(of_other(*arguments), exact)


def test_an_activation_that_becomes_unknown_between_two_calls_of_a_graph():
    experts = training.experts("MixtralExperts", experts_implementation="fusedmlp").eval()
    arguments = torch.randn(7, 16), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    torch._dynamo.reset()
    graph = torch.compile(experts, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(graph(*arguments), experts(*arguments))
    experts.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout())
    with pytest.raises(InternalTorchDynamoError, match="MixtralExperts: got act_fn of class Sequential"):
        graph(*arguments)


def _relu_gate(self, gate_up):
    gate, linear = gate_up.chunk(2, dim=-1)
    return torch.relu(gate) * linear


@pytest.mark.parametrize("where", ["module", "class"])
def test_a_gate_that_is_replaced_between_two_calls_of_a_graph(where, monkeypatch):
    experts = training.experts("MixtralExperts", experts_implementation="fusedmlp")
    arguments = torch.randn(7, 16), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    torch._dynamo.reset()
    graph = torch.compile(experts, backend="eager", fullgraph=True, dynamic=True)
    before = graph(*arguments)
    owner = experts if where == "module" else type(experts)
    monkeypatch.setattr(owner, "_apply_gate", MethodType(_relu_gate, experts) if where == "module" else _relu_gate)
    after = graph(*arguments)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, experts(*arguments))
