"""Tiny models of Hugging Face Transformers with random weights, and the results of their forward and backward."""

import torch
import transformers

import fusedmlp
from fusedmlp.integrations.transformers import register

transformers.logging.set_verbosity_error()
register()

_BASE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS = {
    "mixtral": (transformers.MixtralConfig, {"intermediate_size": 24, "num_local_experts": 4}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    # Gate and linear channels alternate, weights are transposed; a limit so low that many channels are clamped.
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # Squared relu without a gate, and experts that are narrower than the model.
    "nemotron_h": (
        transformers.NemotronHConfig,
        {
            "num_hidden_layers": None,
            "layers_block_type": ["moe", "full_attention", "moe"],
            "intermediate_size": 24,
            "moe_intermediate_size": 20,
            "moe_latent_size": 8,
            "moe_shared_expert_intermediate_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}
MODELS = tuple(_CONFIGS)
# Seeds of weights with which rounding to bfloat16 does not change any token's choice of experts.
_SEEDS = {"mixtral": 9, "qwen3_moe": 7, "deepseek_v3": 1, "gpt_oss": 7, "nemotron_h": 10}

# Parts of parameter names, by group; a parameter belongs to the first group that fits.
_GROUPS = {
    "logits": ("logits",),
    "expert biases": ("up_proj_bias", "down_proj_bias"),
    "experts fc1": (".experts.gate_up_proj", ".experts.up_proj"),
    "experts fc2": (".experts.down_proj",),
    "router": ("router", "mlp.gate.", "mixer.gate."),
    "attention": ("self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
    "norms": ("norm",),
    "dense MLPs": ("shared_experts.", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "latent_proj"),
    "embeddings": ("embed", "lm_head"),
}


def build(kind, implementation, dtype=torch.float32, **changes):
    """A model in training mode. Weights are of the size that keeps activations at 1, so that experts matter."""
    make, options = _CONFIGS[kind]
    options = {name: value for name, value in (_BASE | options | changes).items() if value is not None}
    model = transformers.AutoModelForCausalLM.from_config(make(**options), experts_implementation=implementation)
    generator = torch.Generator().manual_seed(_SEEDS[kind])
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_((1.0 if "norm" in name else 0.0) + 0.2 * noise)
    return model.to(dtype).train()


def expert_parameters(model):
    return [p for name, p in model.named_parameters() if group_of(name) in ("experts fc1", "experts fc2")]


def group_of(name):
    return next(group for group, parts in _GROUPS.items() if any(part in name for part in parts))


def batch(tokens=12, seed=1):
    """Token ids, and a random gradient of the logits."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, _BASE["vocab_size"], (2, tokens // 2), generator=generator)
    return ids, torch.randn(*ids.shape, _BASE["vocab_size"], generator=generator)


def results(model, *, buffered=False):
    """Logits and the gradient of every parameter, in float64, by name; over two micro-batches."""
    buffer, found = fusedmlp.MainGradBuffer(expert_parameters(model)) if buffered else None, {}
    for seed in (1, 2):
        ids, dy = batch(seed=seed)
        logits = model(ids).logits
        logits.backward(dy.to(logits.dtype))
        found[f"logits {seed}"] = logits.detach().double()
    for parameter in [] if buffer is None else buffer.params:
        assert parameter.grad is parameter.main_grad
    for name, parameter in model.named_parameters():
        found[name] = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).double()
    return found


def sgd_steps(model, number, momentum=0.0):
    """Train for some steps of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for step in range(number):
        optimizer.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            ids, dy = batch(seed=seed)
            model(ids).logits.backward(dy / 64)
        optimizer.step()
