"""Whole models of Hugging Face Transformers with `experts_implementation="fusedmlp"` in one graph, with main_grad."""

import copy

import pytest
import torch
from support import transformers_models as models
from support.grids import is_quick
from support.tolerance import assert_close
from torch._dynamo.utils import counters

# Dynamo itself instantiates an autograd.Function while it traces one; inductor imports what torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("qwen3_moe", "aot_eager"),
        pytest.param("qwen3_moe", "inductor", marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "aot_eager", marks=pytest.mark.exhaustive),
    ],
)
def test_every_gradient_of_a_compiled_model(kind, backend, tmp_path, monkeypatch):
    # Inductor's files do not notice that the Python code of an operator changed.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    eager, model = models.build(kind, "eager"), models.build(kind, "fusedmlp")
    if backend == "inductor" or is_quick():  # half as much to compile
        for each in (eager, model):
            each.model.layers = each.model.layers[:1]
            each.config.num_hidden_layers = 1
    expected, low_precision = models.results(copy.deepcopy(eager).double()), models.results(eager)
    model.compile(fullgraph=True, backend=backend, dynamic=True)
    assert_close(models.results(model, main_grad=True), expected, low_precision, torch.float32)
    assert all(parameter.grad_added_to_main_grad for parameter in models.expert_parameters(model))
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 2
    for tokens in (16, 22):
        ids, dy = models.batch(tokens)
        model(ids).logits.backward(dy)
    assert counters["stats"]["unique_graphs"] == graphs  # no load compiles again
