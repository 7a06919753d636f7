"""Each sequence alone and among others gives equal bits: whole models of Transformers, a layer of Megatron's and of
torchtitan's.
"""

from unittest import mock

import pytest
import torch
from support import torchtitan_moe as titan
from support import transformers_models as models
from support.world import launch
from torchtitan.distributed import utils

import fusedmlp
from fusedmlp.integrations.torchtitan import convert
from fusedmlp.integrations.transformers import register

SEQUENCES, LENGTH = 7, 19


def linear(x, weight, bias=None):
    """PyTorch's `F.linear`, of whose rows none depends on another."""
    rows = x.reshape(-1, x.shape[-1])
    y = fusedmlp.grouped_linear(rows, weight[None], [len(rows)], accumulate_wgrad="off", batch_invariant=True)
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def step(model, embeddings):
    x = embeddings.detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    logits.backward(torch.linspace(-1, 1, logits.shape[-1]).expand_as(logits))
    return logits.detach(), x.grad


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_model_of_transformers(kind, batch_invariant):
    """Attention and norms of PyTorch do not depend on the other sequences of a batch; products do, but for `linear`."""
    model = models.build(kind, "fusedmlp")
    register(model, batch_invariant=batch_invariant)
    ids = torch.randint(3, 64, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(4))
    embeddings = model.get_input_embeddings()(ids)
    with mock.patch.object(torch.nn.functional, "linear", linear):
        every = step(model, embeddings)
        alone = [step(model, embeddings[i : i + 1]) for i in range(SEQUENCES)]
    for expected, got in zip(every, zip(*alone, strict=True), strict=True):
        assert torch.equal(torch.cat(got), expected) == batch_invariant


def test_a_layer_of_megatron(tmp_path):
    (found,) = launch("integrations.megatron_batch_invariant:differences", 1, tmp_path)
    assert found.pop(" True") == found.pop("mxfp8 True") == [0, 0]
    assert all(max(other) > 0 for other in found.values())
    assert len(found) == 2


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_experts_of_torchtitan_ask_at_each_call(batch_invariant, monkeypatch):
    """Reinforcement learning sets the mode after the model is built."""
    moe = titan.build(titan.config(), torch.float32)
    convert(moe)
    experts = titan.fused_of(moe)
    monkeypatch.setattr(utils, "_batch_invariant_enabled", batch_invariant)
    x = torch.randn(60, titan.DIM)
    counts = torch.tensor([20, 0, 39, 1])
    y = experts(x, counts)
    alone = torch.cat([experts(x[i : i + 1], torch.tensor([0, 0, 1, 0])) for i in range(20, 59)])
    assert torch.equal(alone, y[20:59]) == batch_invariant


def test_registering_checks_it():
    with pytest.raises(TypeError, match="batch_invariant: expected True or False; got str 'yes'"):
        register(batch_invariant="yes")
