"""Tiny configurations of models with experts: the architectures that are compared."""

from __future__ import annotations

import torch
import transformers
from transformers.models.auto import modeling_auto

from fusedmlp.integrations.peft import uses_interface
from fusedmlp.integrations.transformers import activation_of

# Sizes are multiples of 8: `grouped_mm` wants rows of 16 bytes or more.
_BASE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,  # five times the default, at which experts change less than the tests tolerate
}
_LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": None,
}
_FEW_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}

# By architecture: the start of its classes' names, and its configuration besides `_BASE`.
ARCHITECTURES = {
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "Qwen3-Next": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "OLMoE": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "GLM4-MoE": (
        "Glm4Moe",
        _FEW_ROUTED | {"n_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        _LATENT_ATTENTION | _FEW_ROUTED | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "MiniMax": (
        "MiniMax",
        {"layer_types": ["full_attention", "linear_attention"], "block_size": 3, "num_local_experts": 4},
    ),
    "PhiMoE": ("Phimoe", {"num_local_experts": 4, "router_jitter_noise": 0.0}),
    "Nemotron-H": (
        "NemotronH",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["moe", "full_attention"],
            "moe_intermediate_size": 24,
            "moe_latent_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Granite-MoE": ("GraniteMoe", {"num_local_experts": 4}),
    "Jamba": (
        "Jamba",
        {
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
        },
    ),
}


def class_name(architecture: str) -> str:
    """The name of an architecture's class in `cases.py`."""
    return f"{ARCHITECTURES[architecture][0]}Test"


def describe(architecture: str) -> str:
    """An architecture's experts in words: the activation and its options, biases, layout."""
    tester = Tester(architecture)
    model = tester.base_model_class(tester.get_config())
    experts = next(module for module in model.modules() if uses_interface(module))
    activation = activation_of(experts)
    words = [f"`{activation.name}`"]
    words += ["interleaved"] if activation.interleaved else []
    words += [f"limit {activation.limit:g}"] if activation.limit is not None else []
    words += [f"alpha {activation.alpha:g}"] if activation.alpha is not None else []
    words += [f"offset {activation.linear_offset:g}"] if activation.linear_offset else []
    words += ["biases"] if experts.has_bias else []
    words += ["`in_out` weights"] if experts.is_transposed else []
    return ", ".join(words)


class Tester:
    """The attributes and methods that Transformers' mixins expect of a model's tester."""

    is_training = True
    batch_size, seq_length = 13, 7

    def __init__(self, name: str) -> None:
        start, options = ARCHITECTURES[name]
        self.config_class = getattr(transformers, f"{start}Config")
        self.options = {name: value for name, value in (_BASE | options).items() if value is not None}
        mappings = modeling_auto.MODEL_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        self.base_model_class, self.causal_lm_class = (mapping[self.config_class] for mapping in mappings)
        classification = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        self.sequence_classification_class = classification.get(self.config_class, None)
        self.hidden_size, self.num_attention_heads = self.options["hidden_size"], self.options["num_attention_heads"]
        self.num_hidden_layers = 2

    def all_model_classes(self):
        classes = self.base_model_class, self.causal_lm_class, self.sequence_classification_class
        return tuple(found for found in classes if found is not None)

    def get_config(self):
        return self.config_class(**self.options)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, _BASE["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
