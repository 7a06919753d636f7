"""Hugging Face Transformers: experts by `experts_implementation`, weights in bfloat16, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import sonicmoe

from bench.gpu.stacks.training import Training
from bench.gpu.stacks.widths import LAYERS, LEARNING_RATE, VOCABULARY, Widths
from fusedmlp.integrations.transformers import register

Wrap = Callable[[nn.Module], nn.Module]


def variants(widths: Widths, device: str, compiled: bool) -> dict[str, Callable[[], Training]]:
    """Trainings by the name of the experts; the first has PyTorch's `grouped_mm`."""
    names = ["grouped_mm", "fusedmlp"]
    if device == "cuda" and sonicmoe.is_sonicmoe_loadable():
        names.append("sonicmoe")

    def wrap(model: nn.Module) -> nn.Module:
        model.compile(backend="inductor" if device == "cuda" else "aot_eager")
        return model

    return {name: partial(build, widths, device, name, wrap if compiled else None) for name in names}


def build(widths: Widths, device: str, experts: str, wrap: Wrap | None = None) -> Training:
    """A model with random weights, the same for all experts; `wrap` compiles it, or makes a DDP of it."""
    register()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config(widths), experts_implementation=experts, dtype=torch.bfloat16
        )
    modules = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    wrapped = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device == "cuda")

    def step(text: Sequence[Tensor], update: bool) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for ids in text:
            loss = wrapped(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss / len(text)
            loss.backward()
            total += loss.detach()
        if update:
            optimizer.step()
        return float(total)

    return Training(step, modules)


def config(widths: Widths) -> Any:
    """The configuration of Transformers' model with these widths."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": widths.hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.kv_heads,
        "num_experts_per_tok": widths.top_k,
        "max_position_embeddings": widths.length,
        "use_cache": False,
        "initializer_range": widths.hidden**-0.5,
    }
    if widths.name == "mixtral":
        sizes = {"intermediate_size": widths.ffn, "num_local_experts": widths.experts}
        return transformers.MixtralConfig(**common, **sizes, head_dim=widths.head_dim)
    common["moe_intermediate_size"] = widths.ffn
    if widths.name == "deepseek-v3":
        groups = {"n_routed_experts": widths.experts, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
        return transformers.DeepseekV3Config(**common | {"num_key_value_heads": widths.heads}, **groups)
    return transformers.Qwen3MoeConfig(**common, num_experts=widths.experts, head_dim=widths.head_dim)
