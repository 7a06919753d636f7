"""Fields of Megatron-core's `TransformerConfig` that the fused experts honour, and fields that they refuse.

Honoured: `gated_linear_unit`, `activation_func`, `activation_func_clamp_value`, `glu_linear_offset`,
`add_bias_linear`, `moe_ffn_hidden_size`, `moe_latent_size`, `moe_apply_probs_on_input`,
`gradient_accumulation_fusion` (False: gradients go through autograd), `delay_wgrad_compute`, `params_dtype`, the
initialisation fields, expert and tensor parallel sizes, `moe_single_grouped_weight`, `moe_single_grouped_bias`,
`batch_invariant_mode`; `fp8="e4m3"` with `fp8_recipe="blockwise"` or `"mxfp8"`, `fp8_wgrad` and
`first_last_layers_bf16`; with `fp8_param`, parameters stay in `params_dtype`. `bias_activation_fusion`,
`use_fused_weighted_squared_relu`, `use_transformer_engine_op_fuser` and `moe_act` recomputation ask for what the
kernels always do; so does `moe_use_grouped_tensor` (0.20). `moe_router_padding_for_quantization` adds rows, which
8-bit recipes do not need. `refuse_unsupported`, `activation` and `recipe` refuse the rest, also fields about experts
that megatron-core 0.17 to 0.20 do not have, if they are set.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core import activations, fp8_utils
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from fusedmlp.activation import Activation
from fusedmlp.integrations import megatron_offload

# Function -> names of the plain and of the gated activation.
_ACTIVATIONS: dict[Callable[..., Any], tuple[str, str | None]] = {
    F.silu: ("silu", "swiglu"),
    F.gelu: ("gelu", "geglu"),
    F.relu: ("relu", "reglu"),
    quick_gelu: ("quick_gelu", "quick_geglu"),
    activations.quick_gelu: ("quick_gelu", "quick_geglu"),  # the same formula; Megatron fuses the other one alone
    activations.squared_relu: ("relu2", None),
}
_RECIPES = {"blockwise": "fp8_block", "mxfp8": "mxfp8"}  # fp8_recipe -> recipe
# Field -> what it asks for. TEGroupedMLP supports that; ignoring the field would change the computation.
_REFUSED = {
    "fp4": "experts of 4 bits",
    "use_te_activation_func": "TransformerEngine's activation modules",
    "moe_mlp_glu_interleave_size": "gate and linear channels in interleaved blocks",
    "moe_ncclep_zero_copy": "outputs in buffers of the dispatcher",
    "activation_func_fp8_input_store": "fp8 storage of the activation's input",
    "overlap_dispatch_backward_with_experts_wgrad": "weight gradients computed inside the dispatcher's backward",
    "quant_recipe": "quantised experts",
    "moe_paged_stash": "paged activations of TransformerEngine's own fused experts",
}
_SENT_AS_MXFP8 = {"moe_dispatch_fwd_dtype": "rows", "moe_combine_bwd_dtype": "gradients of the experts' output"}
# Further fields that `refuse_unsupported`, `activation` and `recipe` read: forward follows them when they change.
_FOLLOWED = (
    *("activation_func", "activation_func_clamp_value", "glu_linear_offset", "bias_activation_fusion"),
    *("fp8", "fp8_recipe", "fp8_wgrad", "first_last_layers_bf16", "moe_apply_probs_on_input", "moe_router_topk"),
    *("fine_grained_activation_offloading", "offload_modules", "expert_gtp_weight_remat_size", "transformer_impl"),
    *("batch_invariant_mode", "bias_dropout_fusion", "overlap_moe_expert_parallel_comm", "moe_token_dispatcher_type"),
    *("moe_flex_dispatcher_backend", "num_moe_experts", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
# Fields that decide which parameters and queues are made: forward refuses another value.
_BUILT = (
    *("gated_linear_unit", "add_bias_linear", "delay_wgrad_compute"),
    *("moe_single_grouped_weight", "moe_single_grouped_bias"),
)
# Fields whose name says that they may be about experts, and those of them that 0.17 to 0.20 have: honoured, refused, or
# about the router, the dispatcher, shared experts, losses, recomputation and attention.
_MAY_BE_ABOUT_EXPERTS = re.compile("moe_|activation_|glu_|expert|fp8|fp4|quant|wgrad")
_KNOWN = re.compile(
    r"moe_(router|shared_expert|hybridep|permute_fusion|token_drop|paged_stash|deepep|flex_dispatcher|enable)\w*"
    r"|moe_(apply_probs_on_input|aux_loss_coeff|combine_bwd_dtype|dispatch_fwd_dtype|expert_(rank_)?capacity_factor"
    r"|extended_tp|ffn_hidden_size|grad_scale_func|grouped_gemm|input_jitter_eps|latent_size|layer_(freq|recompute)"
    r"|mlp_glu_interleave_size|ncclep_(static_shape|zero_copy)|pad_expert_input_to_capacity"
    r"|pad_experts_for_cuda_graph_inference|per_layer_logging|single_grouped_(weight|bias)|token_dispatcher_type"
    r"|use_grouped_tensor|use_legacy_grouped_gemm|z_loss_coeff)"
    r"|fp8(_\w+)?|fp4(_\w+)?|inference_moe_\w+"
    r"|activation_(func(_clamp_value|_fp8_input_store)?|offload_fraction)|bias_activation_fusion|glu_linear_offset"
    r"|expert_(gtp_weight_remat_size|model_parallel_size|tensor_parallel_(num_weight_shards|size))|num_moe_experts"
    r"|fine_grained_activation_offloading|num_microbatches_with_partial_activation_checkpoints"
    r"|delay_wgrad_compute|defer_embedding_wgrad_compute|overlap_dispatch_backward_with_experts_wgrad"
    r"|overlap_moe_expert_parallel_comm|quant_recipe|tp_comm_bulk_wgrad|use_grouped_gemm_for_shared_expert"
    r"|use_te_activation_func|wgrad_deferral_limit"
)


def unknown_fields(kind: type) -> list[dataclasses.Field[Any]]:
    """Fields of Megatron-core's own classes that may be about experts and that this module does not know, with the
    defaults that Megatron gives them: classes derived from them may have others.
    """
    found: dict[str, dataclasses.Field[Any]] = {}
    for cls in reversed(kind.__mro__):
        if cls.__module__.startswith("megatron.core") and dataclasses.is_dataclass(cls):
            for field in dataclasses.fields(cls):
                found.setdefault(field.name, field)
    return [field for name, field in found.items() if _MAY_BE_ABOUT_EXPERTS.search(name) and not _KNOWN.fullmatch(name)]


def reader(config: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads, in C time, every field of a config that experts follow, or that must stay."""
    names = (*_REFUSED, *_SENT_AS_MXFP8, *_FOLLOWED, *_BUILT, *(field.name for field in unknown_fields(type(config))))
    return operator.attrgetter(*(name for name in names if hasattr(config, name)))


def built(config: Any) -> dict[str, Any]:
    """Return the fields that decide which parameters and queues experts have, and their values."""
    return {name: getattr(config, name, False) for name in _BUILT}


def refuse_rebuilt(config: Any, values: dict[str, Any]) -> None:
    """Raise ValueError for a field that is no longer what `built` found."""
    for name, value in values.items():
        if (now := getattr(config, name, False)) != value:
            raise ValueError(
                f"config.{name}: expected {value!r}, its value when these experts were built (set it before the model "
                f"is built); got {now!r}"
            )


def _refuse_unknown(config: Any) -> None:
    for field in unknown_fields(type(config)):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if (value := getattr(config, field.name, default)) != default:
            raise ValueError(
                f"config.{field.name}: expected {default!r}, as FusedGroupedMLP does not know this field and what it "
                f"changes (keep TEGroupedMLP for that); got {value!r}"
            )


def refuse_unsupported(config: Any) -> None:
    """Raise for the first config field that the fused experts cannot honour."""
    _refuse_unknown(config)
    for name, sent in _SENT_AS_MXFP8.items():
        if (value := getattr(config, name, "bf16")) != "bf16":
            raise ValueError(
                f"config.{name}: expected 'bf16', as FusedGroupedMLP takes {sent} in 16 bits (keep TEGroupedMLP for "
                f"that); got {value!r}"
            )
    for name, feature in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in (None, False):
            raise ValueError(
                f"config.{name}: expected it unset, as FusedGroupedMLP does not support {feature} (keep TEGroupedMLP "
                f"for that); got {value!r}"
            )
    megatron_offload.modules(config)
    shards = getattr(config, "expert_gtp_weight_remat_size", 1)
    if shards > 1:
        raise ValueError(
            "config.expert_gtp_weight_remat_size: expected 1, as FusedGroupedMLP does not gather shards of a weight "
            f"(leave expert_tensor_parallel_num_weight_shards unset); got {shards}"
        )
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        raise ValueError("config.transformer_impl: expected 'local' or 'transformer_engine'; got 'inference_optimized'")
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise ValueError(
            f"config.moe_apply_probs_on_input: expected False, or moe_router_topk 1; got {config.moe_router_topk}"
        )
    if config.add_bias_linear and (config.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(
            "config.add_bias_linear: expected expert_tensor_parallel_size 1, as every rank would add the bias of fc2; "
            f"got {config.expert_tensor_parallel_size}"
        )
    if config.add_bias_linear and config.bias_dropout_fusion:
        raise ValueError(
            "config.bias_dropout_fusion: expected False with add_bias_linear, as experts add their bias themselves and "
            "return none; got True"
        )


def activation(config: Any) -> Activation:
    """Return the experts' activation; a gated one has the config's clamp and offset, which a plain one ignores.

    Raises:
        ValueError: fusedmlp does not have it.
    """
    function = config.activation_func
    if isinstance(function, partial) and function.func is F.gelu and function.keywords == {"approximate": "tanh"}:
        names: tuple[str, str | None] = ("gelu_tanh", "geglu_tanh")
    else:
        names = _ACTIVATIONS.get(function, ("", None))
    name = names[config.gated_linear_unit]
    if not name:
        kind = "gated" if config.gated_linear_unit else "plain"
        raise ValueError(
            f"config.activation_func: expected a {kind} activation that fusedmlp has (silu, gelu, gelu with "
            f"approximate='tanh', relu, quick_gelu; squared_relu if not gated); got {function}"
        )
    if not config.gated_linear_unit:
        return Activation(name)
    limit = config.activation_func_clamp_value
    clamps = hasattr(config, "moe_use_grouped_tensor")  # 0.20
    if limit is not None and config.bias_activation_fusion and function is F.silu and not clamps:
        warnings.warn(
            f"config.activation_func_clamp_value: FusedGroupedMLP clamps at {limit}; TEGroupedMLP, up to megatron-core "
            "0.19, does not clamp swiglu with bias_activation_fusion (set None to compute as it does)",
            stacklevel=4,
        )
    return Activation(name, limit=limit, linear_offset=getattr(config, "glu_linear_offset", 0.0))


def recipe(config: Any) -> tuple[str | None, str]:
    """Return `recipe` and `wgrad`, as `grouped_mlp` takes them.

    Raises:
        ValueError: fusedmlp has no such 8-bit recipe, nothing tells in which layers, or Megatron frees the input.
    """
    if not config.fp8:
        return None, "recipe"
    if config.fp8 != "e4m3":
        raise ValueError(
            "config.fp8: expected None or 'e4m3', the only 8-bit format of FusedGroupedMLP, for gradients, too (keep "
            f"TEGroupedMLP for others); got {config.fp8!r}"
        )
    if config.fp8_recipe not in _RECIPES:
        raise ValueError(
            "config.fp8_recipe: expected 'blockwise' or 'mxfp8', the only recipes of FusedGroupedMLP with fp8='e4m3' "
            f"(keep TEGroupedMLP for others); got {config.fp8_recipe!r}"
        )
    if config.first_last_layers_bf16 and not hasattr(fp8_utils, "FP8GlobalStateManager"):
        raise ValueError(
            "config.first_last_layers_bf16: expected False with fp8 where TransformerEngine is not installed, as its "
            "fp8 context, which Megatron opens around a layer, tells experts that the layer computes in 8 bits; got "
            "True"
        )
    if _frees_input(config):
        raise ValueError(
            "config.overlap_moe_expert_parallel_comm: expected False with fp8 and one expert on a rank or hybridep or "
            "ncclep, as Megatron then frees the rows that backward needs (keep TEGroupedMLP for that); got True"
        )
    return _RECIPES[config.fp8_recipe], "recipe" if config.fp8_wgrad else "bf16"


def in_16_bits(config: Any) -> bool:
    """Tell whether Megatron runs this layer in 16 bits, though the config has fp8: one of its first or last layers."""
    return bool(config.first_last_layers_bf16 and not fp8_utils.FP8GlobalStateManager.is_fp8_enabled())


def in_megatrons_words(message: str) -> str:
    """Translate an error about an argument of `grouped_mlp` to the parameter, and the cure, that Megatron has."""
    message = re.sub(r"\bfc([12])_(weight|bias)(?:\[(\d+)\])?", r"linear_fc\1.\2\3", message)
    return message.replace(
        "attach one with fusedmlp.MainGradBuffer",
        "wrap the model in megatron.core.distributed.DistributedDataParallel, or set "
        "config.gradient_accumulation_fusion=False",
    )


def _frees_input(config: Any) -> bool:
    """Whether Megatron frees the experts' input as soon as forward has run, because with fp8 backward has 8-bit copies.

    Its schedule frees what a dispatcher returned; without fp8 only if the dispatcher then copies it for the experts.
    """
    if not config.overlap_moe_expert_parallel_comm:
        return False
    if config.moe_token_dispatcher_type == "flex":
        return config.moe_flex_dispatcher_backend in ("hybridep", "ncclep")
    return bool(config.num_moe_experts == config.expert_model_parallel_size)
