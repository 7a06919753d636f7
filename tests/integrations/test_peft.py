"""PEFT's LoRA on the experts of Transformers' models, taken over by fusedmlp, beside PEFT with eager experts."""

import copy
import re
from pathlib import Path

import pytest
import torch
from support import forked
from support import peft_experts as adapted
from support import transformers_models as models
from support import transformers_training as training
from support.allocations import copies_and_allocations

from bench.oracle.tolerance import errors_of
from fusedmlp.integrations.peft import report

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
ROOT = Path(__file__).parents[2]
# Larger tolerances would pass anything; a token that rounding sends to other experts would cause one.
MEANINGFUL = {torch.float32: 1e-5, torch.bfloat16: 0.1}


def words(model):
    """What `report` says, without the names of layers."""
    return {word for words in report(model).values() for word in words.split(", ")}


@pytest.mark.parametrize("dtype", MEANINGFUL, ids=str)
@pytest.mark.parametrize("kind", models.MODELS)
def test_logits_and_gradients_of_adapters(kind, dtype):
    eager, fused = (adapted.build(kind, name, dtype) for name in ("eager", "fusedmlp"))
    assert words(fused) == {f"{name.partition('.')[2]}: fused" for name in adapted.targets(kind)}
    expected = adapted.results(copy.deepcopy(eager).double())
    errors = errors_of(adapted.results(fused), expected, adapted.results(eager), dtype)
    assert errors.allowed() < MEANINGFUL[dtype]
    errors.verify(kind)
    assert all(expected[name].any() for name in expected)


CELLS = {"plain": None, "reentrant": True, "not reentrant": False}


@pytest.fixture(scope="module")
def ten_eager_steps(tmp_path_factory):
    return trained("eager", tmp_path_factory.mktemp("eager"), None)


def trained(implementation, folder, use_reentrant):
    """Losses of ten steps of two micro-batches, and the adapters after them."""
    model = adapted.build("qwen3_moe", implementation)
    options = {"max_steps": 10, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    options |= {"activation_checkpointing": use_reentrant is not None}
    options |= {"activation_checkpointing_kwargs": {"use_reentrant": bool(use_reentrant)}}
    losses = [entry["loss"] for entry in training.train(model, str(folder), **options)]
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", CELLS)
def test_trainer_loses_and_trains_as_with_eager_experts_for_ten_steps(checkpointing, ten_eager_steps, tmp_path):
    expected, adapters = ten_eager_steps
    losses, ours = trained("fusedmlp", tmp_path, CELLS[checkpointing])
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(expected, abs=2e-5)
    assert len(ours) == 8  # A and B of two weights of two layers
    start = dict(adapted.build("qwen3_moe", "eager").named_parameters())
    for name, parameter in adapters.items():
        moved = (parameter - start[name]).abs().max()
        assert moved > 0.01, name
        assert (ours[name] - parameter).abs().max() <= 1e-2 * moved, name


def test_a_step_allocates_nothing_as_large_as_a_stack_of_weights():
    found = {}
    for implementation in ("grouped_mm", "fusedmlp"):
        model = adapted.build("qwen3_moe", implementation)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        ids, dy = models.batch()

        def step(model=model, optimizer=optimizer, ids=ids, dy=dy):
            model(ids).logits.backward(dy)
            optimizer.step()
            optimizer.zero_grad()

        step()  # activations are compared once
        found[implementation] = copies_and_allocations(step, [p for p in model.parameters() if p.dim() == 3])
    assert found["fusedmlp"] == {"copies": 0, "allocations": 0}
    # For each of two weights of two layers: W + B A, once more as PEFT's check, and the gradient of all weights.
    assert found["grouped_mm"]["allocations"] >= 12


@pytest.mark.slow
def test_the_example_trains():
    done = forked.run(str(ROOT / "examples" / "lora_qwen3_moe.py"), "--steps", "8")
    assert done.returncode == 0, done.stderr[-3000:]
    layers = re.findall(r"layers\.\d\.mlp\.experts: (.*)", done.stdout)
    assert layers == ["gate_up_proj: fused, down_proj: fused"] * 2
    first, last = map(float, re.findall(r"loss, \w+ step: ([\d.]+)", done.stdout))
    assert last < first - 0.1
