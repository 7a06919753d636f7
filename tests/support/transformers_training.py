"""Tiny models under Transformers' Trainer and under PEFT, and experts without a model around them."""

from importlib import import_module
from types import SimpleNamespace

import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import transformers_models as models

from fusedmlp.integrations.transformers import register

ON_CPU = {"per_device_train_batch_size": 2, "seed": 0, "report_to": "none", "disable_tqdm": True}
ON_CPU |= {"use_cpu": True, "dataloader_pin_memory": False}
CELLS = [
    {"accumulation": 1, "checkpointing": None, "wgrad": "auto"},
    {"accumulation": 2, "checkpointing": "reentrant", "wgrad": "auto"},
    {"accumulation": 2, "checkpointing": "not reentrant", "wgrad": "grad"},
]


_eager = {}


def eager_losses(folder, accumulation):
    """Losses of the eager experts, trained once: checkpointing does not change their results."""
    if accumulation not in _eager:
        _eager[accumulation] = losses(folder, "eager", accumulation=accumulation, checkpointing=None, wgrad="auto")
    return _eager[accumulation]


def losses(folder, implementation, *, accumulation, checkpointing, wgrad):
    """The training loss of each of 20 steps."""
    # The name is "activation" since Transformers 5.23.
    name = "activation" if hasattr(transformers.TrainingArguments, "activation_checkpointing") else "gradient"
    options = {
        "gradient_accumulation_steps": accumulation,
        f"{name}_checkpointing": checkpointing is not None,
        f"{name}_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"},
    }
    register(accumulate_wgrad=wgrad)
    try:
        return [entry["loss"] for entry in train(models.build("mixtral", implementation), folder, **options)]
    finally:
        register()


def train(model, folder, *, trainer=transformers.Trainer, callbacks=(), resume=None, **options):
    """The log entries of 20 steps by `Trainer`, or by the given kind of it."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        logging_steps=1,
        **ON_CPU,
        **{"max_steps": 20, "learning_rate": 1e-2, "save_strategy": "no"} | options,
    )
    trainer = trainer(model, arguments, train_dataset=texts(), callbacks=list(callbacks))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def texts():
    """Something to learn: each token is the one before plus three."""
    texts = []
    for start in range(40):
        ids = (start + 3 * torch.arange(12)) % 64
        texts.append({"input_ids": ids, "labels": ids})
    return texts


def with_lora(model, *, experts=False):
    """LoRA on two projections of the attention, or also on the experts' weights; everything else is frozen."""
    targets = ["gate_up_proj", "down_proj"] if experts else None
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=targets, lora_dropout=0.0)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # B is zero at first, which would leave A without a gradient
            with torch.no_grad():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapted


def experts(name, **options):
    """The experts of a model that Transformers has, 4 of them, hidden size 16, with random weights."""
    sizes = dict.fromkeys(("hidden_size", "moe_hidden_size"), 16)
    sizes |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 12)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    config = SimpleNamespace(
        **sizes,
        **dict.fromkeys(names, 4),
        hidden_act="silu",
        hidden_activation="gelu_pytorch_tanh",
        mlp_hidden_act="relu2",
        swiglu_limit=1.25,
        swiglu_alpha=1.5,
        moe_latent_size=None,
        mlp_gate_softcap=30.0,
        mlp_up_softcap=30.0,
        post_norm_eps=1e-6,
    )
    implementation = options.pop("experts_implementation")
    vars(config).update(options, _experts_implementation=implementation)
    model = _MODULES[name]
    made = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        with torch.no_grad():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return made


_MODULES = {
    "AriaExperts": "aria",
    "BeamExperts": "beam",
    "DeepseekV4Experts": "deepseek_v4",
    "Gemma4TextExperts": "gemma4",
    "Glm5NextTextExperts": "glm5_next",
    "GptOssExperts": "gpt_oss",
    "Inkling2Experts": "inkling2",
    "Lfm2MoeExperts": "lfm2_moe",
    "MiniMaxM3VLExperts": "minimax_m3_vl",
    "MixtralExperts": "mixtral",
    "MuseSparkExperts": "muse_spark",
    "NemotronHExperts": "nemotron_h",
    "OpenAIPrivacyFilterExperts": "openai_privacy_filter",
}


_SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DBRX = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 16, "moe_num_experts": 2},
}
# By the name in docs/transformers.md: a model, its experts and configuration, of Transformers 5.23.
_IGNORING = {
    "DBRX": ("DbrxModel", "DbrxExperts", "DbrxConfig", {"d_model": 16, "n_heads": 2, "n_layers": 1} | _DBRX),
    "Doge": ("DogeModel", "DogeCDMoE", "DogeConfig", _SIZES | _HEADS | {"is_moe": True, "num_experts": 4}),
    "JetMoE": ("JetMoeModel", "JetMoeParallelExperts", "JetMoeConfig", _SIZES | {"kv_channels": 8}),
    "Llama 4": (
        "Llama4TextModel",
        "Llama4TextExperts",
        "Llama4TextConfig",
        _SIZES | _HEADS | {"intermediate_size_mlp": 24, "num_local_experts": 2},
    ),
    "LongCat-Flash": (
        "LongcatFlashModel",
        "LongcatFlashExperts",
        "LongcatFlashConfig",
        _SIZES | _LATENT | {"num_layers": 1, "num_attention_heads": 2, "n_routed_experts": 4},
    ),
    "NLLB-MoE": (
        "NllbMoeModel",
        "NllbMoeExperts",
        "NllbMoeConfig",
        {"vocab_size": 64, "d_model": 16, "num_experts": 2, "encoder_layers": 4, "decoder_layers": 4},
    ),
    "Step 3.7": (
        "Step3p7TextModel",
        "Step3p7Experts",
        "Step3p7TextConfig",
        _SIZES | _HEADS | {"mlp_layer_types": ["sparse"] * 2, "num_local_experts": 4, "moe_intermediate_size": 12},
    ),
    "Switch Transformers": (
        "SwitchTransformersModel",
        "SwitchTransformersExperts",
        "SwitchTransformersConfig",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2, "num_experts": 2},
    ),
    "ViTPose": (
        "VitPoseBackbone",
        "VitPoseNaiveMoe",
        "VitPoseBackboneConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 2, "part_features": 8},
    ),
}
IGNORING = tuple(_IGNORING)


def ignoring(name):
    """A model that was built for "fusedmlp", which its experts ignore, and their class."""
    model, experts, config, options = _IGNORING[name]
    made = getattr(transformers, config)(**options)
    made._experts_implementation = "fusedmlp"
    module = import_module(type(made).__module__.replace("configuration_", "modeling_"))
    return getattr(module, model)(made), getattr(module, experts)
