"""Checkpoints as they are published: loaded for fusedmlp, trained, saved, and read by plain Transformers.

Names and shapes are those of the files of mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B, deepseek-ai/DeepSeek-V3
(before its quantization), gpt-oss in bf16 and NVIDIA's Nemotron-H: experts one by one, or packed; numbers are random.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import transformers_models as models
from transformers import AutoModelForCausalLM

import fusedmlp

# By model: a name in modules and in files; the files' names for an expert's gate, linear part and fc2.
_NAMES = {
    "mixtral": ((".mlp.", ".block_sparse_moe."), ("w1.weight", "w3.weight", "w2.weight")),
    "qwen3_moe": (("", ""), ("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
    "deepseek_v3": (("", ""), ("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
    "nemotron_h": (("model.", "backbone."), (None, "up_proj.weight", "down_proj.weight")),
    "gpt_oss": None,
}
_EMBEDDINGS = {"backbone.embed_tokens": "backbone.embeddings", "backbone.norm.": "backbone.norm_f."}


def published(kind, model):
    """The tensors of a model as its published files hold them."""
    if _NAMES[kind] is None:
        return dict(model.state_dict())
    (ours, theirs), (gate, linear, down) = _NAMES[kind]
    found = {}
    for name, tensor in model.state_dict().items():
        name = name.replace(ours, theirs, 1) if ours else name
        for old, new in _EMBEDDINGS.items():
            name = name.replace(old, new)
        path, _, what = name.partition(".experts.")
        if not what:
            found[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            if what == "gate_up_proj":
                found[f"{path}.experts.{e}.{gate}"], found[f"{path}.experts.{e}.{linear}"] = expert.chunk(2)
            else:
                found[f"{path}.experts.{e}.{linear if what == 'up_proj' else down}"] = expert
    return found


def write(tensors, config, folder, shards=3):
    """Write the tensors so that the experts of a layer lie in several files."""
    config.save_pretrained(folder)
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensor.contiguous() for name, tensor in list(tensors.items())[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in _NAMES), ("qwen3_moe", {"tie_word_embeddings": True})],
    ids=lambda value: value if isinstance(value, str) else "tied" if value else "",
)
def test_load_train_save_and_load(kind, changes, tmp_path):
    source = models.build(kind, "eager", **changes)
    tensors = published(kind, source)
    if changes:  # one table, which files hold once
        del tensors["lm_head.weight"]
    (tmp_path / "hub").mkdir()
    write(tensors, source.config, tmp_path / "hub")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", experts_implementation="fusedmlp").train()
    for (name, got), expected in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(got, expected), name

    buffer = fusedmlp.MainGradBuffer(models.expert_parameters(model))
    models.sgd_steps(model, 2)
    assert all(param.grad is param.main_grad for param in buffer.params)
    models.sgd_steps(source, 2)
    for (name, got), expected in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    changed = read(tmp_path / "hub")
    assert not any(torch.equal(t, changed[name]) for name, t in published(kind, model).items() if ".experts." in name)

    model.save_pretrained(tmp_path / "saved", max_shard_size="8KB")
    saved = read(tmp_path / "saved")
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in tensors.items()}
    for name, tensor in published(kind, model).items():
        assert torch.equal(saved.get(name, tensor), tensor), name
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", experts_implementation="eager").train()
    ids, _ = models.batch()
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
