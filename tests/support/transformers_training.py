"""Tiny models under Transformers' Trainer and under PEFT, and experts without a model around them."""

from importlib import import_module
from types import SimpleNamespace

import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import transformers_models as models

from fusedmlp.integrations.transformers import register

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
        per_device_train_batch_size=2,
        seed=0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
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


def llama4():
    """A model whose experts Transformers' interface of experts does not reach."""
    config = transformers.Llama4TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        intermediate_size_mlp=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        pad_token_id=0,
    )
    return transformers.Llama4ForCausalLM(config)
