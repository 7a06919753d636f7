"""Tiny models of Transformers with PEFT's LoRA on the weights of their experts."""

import torch
from peft import LoraConfig, get_peft_model
from support import transformers_models as models

STD = 0.1  # of A and B: so small that rounding changes no token's choice of experts


def targets(kind):
    return ["experts.up_proj" if kind == "nemotron_h" else "experts.gate_up_proj", "experts.down_proj"]


def config(kind, **options):
    return LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": targets(kind)} | options)


def build(kind, implementation, dtype=torch.float32, **options):
    """A model whose experts have an adapter; all other parameters are frozen."""
    return filled(get_peft_model(models.build(kind, implementation, dtype), config(kind, **options)))


def filled(model, seed=4):
    """Give A and B numbers: PEFT begins with zero in B, which would leave A without a gradient."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.copy_(STD * torch.randn(parameter.shape, generator=generator))
    return model


def results(model):
    """Logits of two micro-batches, and gradients of A and B, in float64, by name."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    return {n: v for n, v in models.results(model).items() if n in trained or n.startswith("logits")}


def logits(model, seed=1):
    with torch.no_grad():
        return model(models.batch(seed=seed)[0]).logits
