"""Config fields that change after the experts are built, layers in 16 bits, `fp8_param`. Runs in a `world`."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest import mock

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
import torch.distributed as dist
import torch.nn.functional as F
from integrations.megatron_eight_bit import EightBitCell
from integrations.megatron_eight_bit import config_of as cell_config
from integrations.megatron_layers import REFUSED, eight_bit_config, expect, fused, make_config, raised, weights_of
from integrations.megatron_optimizer_checkpoints import Training, as_on_gpu
from megatron.core import activations, fp8_utils
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from support.megatron_experts import train_step

from fusedmlp.integrations.megatron import FusedGroupedMLP, with_fused_experts

COUNTS = [3, 0, 5, 2]
LARGE = [130, 0, 125, 1]  # 64 rows on average, the least that are quantized
SIZES = {"hidden_size": 128, "moe_ffn_hidden_size": 128, "ffn_hidden_size": 128}
TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
FOLLOWED = {
    "activation_func": F.gelu,
    "activation_func_clamp_value": 0.1,
    "glu_linear_offset": 1.0,
    "moe_apply_probs_on_input": True,
    "fp8": "e4m3",
    "fp8_wgrad": False,
    "fp8_param": True,
}
BUILT = "its value when these experts were built .* got"
REFUSED_LATE = {
    **{name: REFUSED[name] for name in ("moe_mlp_glu_interleave_size", "moe_paged_stash")},
    **{name: REFUSED[name] for name in ("fp4", "use_te_activation_func")},
    "fp8_recipe": ("delayed", "fp8_recipe: expected 'blockwise' or 'mxfp8', .* got 'delayed'"),
    "moe_router_topk": (2, REFUSED["moe_apply_probs_on_input"][1]),
    "gated_linear_unit": (False, f"gated_linear_unit: expected True, {BUILT} False"),
    "add_bias_linear": (True, f"add_bias_linear: expected False, {BUILT} True"),
    "delay_wgrad_compute": (True, f"delay_wgrad_compute: expected False, {BUILT} True"),
    "moe_single_grouped_weight": (True, f"moe_single_grouped_weight: expected False, {BUILT} True"),
}


def late_config(**options):
    """A config of 8-bit experts of top-1 routing, so that each field of the tables has a meaning by itself."""
    return eight_bit_config("blockwise", **SIZES | TOP_1 | options)


def step(experts, counts=LARGE):
    """The output, and the gradients of rows and weights."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(sum(counts), experts.config.hidden_size, generator=generator) for _ in range(2))
    probs = torch.rand(len(x), generator=generator)
    experts.zero_grad()
    y, _ = experts(x.requires_grad_(), torch.tensor(counts), probs)
    y.backward(dy)
    return [y, x.grad, *(weight.grad for pair in weights_of(experts) for weight in pair)]


def equal(found, other):
    return all(torch.equal(a, b) for a, b in zip(found, other, strict=True))


def followed():
    """By field: does a late value compute what an early one does, and the value before what it did."""
    megatron_world.model_parallel()
    found = {}
    for name, value in FOLLOWED.items():
        before = {"fp8": None} if name == "fp8" else {}
        early, late = (late_config(**before) for _ in range(2))
        setattr(early, name, value)
        experts = []
        for config in (early, late):
            torch.manual_seed(3)
            experts.append(fused(config))
        first, old = step(experts[1]), getattr(late, name)
        setattr(late, name, value)
        second, want = step(experts[1]), step(experts[0])
        setattr(late, name, old)
        found[name] = [equal(second, want), equal(second, first), equal(step(experts[1]), first)]
    return found


def refused():
    """Assert that every forward raises after a field was set; return how many fields exist in this version."""
    megatron_world.model_parallel()
    count = 0
    for name, (value, message) in REFUSED_LATE.items():
        config = late_config(moe_apply_probs_on_input=True)
        if not hasattr(config, name):
            continue
        experts = fused(config)
        step(experts)
        setattr(config, name, value)
        for _ in range(2):
            expect(message, partial(step, experts))
        count += 1
    return count


def fields_read_in_silence():
    """Fields that the constructor reads, and that neither forward compares nor a shape or a name fixes."""
    megatron_world.model_parallel()
    names = set()

    class Recording(TransformerConfig):
        def __getattribute__(self, name):
            names.add(name)
            return super().__getattribute__(name)

    for options in ({}, {"add_bias_linear": True}, {"moe_apply_probs_on_input": True, **TOP_1}):
        config = make_config(**options)
        config.fp8, config.fp8_recipe = "e4m3", "blockwise"
        config.overlap_moe_expert_parallel_comm = True
        config.__class__ = Recording
        names.clear()
        experts = fused(config)
        built = set(names)
        names.clear()
        experts._read_config(config)
        built -= names
    return sorted(name for name in built if not name.startswith("__") and hasattr(config, name))


def quick_gelus():
    """Do the two functions of that name compute the same, and our experts with either."""
    megatron_world.model_parallel()
    x = torch.linspace(-20, 20, 4001)
    outputs = []
    for function in (quick_gelu, activations.quick_gelu):
        torch.manual_seed(3)
        outputs.append(step(fused(make_config(activation_func=function)), COUNTS))
    return [torch.equal(quick_gelu(x), activations.quick_gelu(x)), equal(*outputs)]


@contextmanager
def fp8_context(enabled):
    """A stand-in for TransformerEngine's fp8 context, which Megatron's `get_fp8_context` opens around a layer."""
    manager = mock.Mock(**{"is_fp8_enabled.return_value": enabled})
    with mock.patch.object(fp8_utils, "FP8GlobalStateManager", manager, create=True):
        yield


def first_and_last_layers():
    """By layer of a model of four: does it compute as with fp8, and as without."""
    megatron_world.model_parallel()
    options = {"num_layers": 4, **SIZES}
    results = {}
    for fp8 in ("e4m3", None):
        torch.manual_seed(3)
        results[fp8] = step(fused(eight_bit_config("blockwise", fp8=fp8, **options)))
    config = eight_bit_config("blockwise", first_last_layers_bf16=True, fp8_wgrad=False, **options)
    config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16 = 1, 2
    config.fp8_wgrad = True
    with fp8_context(True):
        torch.manual_seed(3)
        experts = fused(config)
    found = []
    for layer in range(4):
        with fp8_context(not fp8_utils.is_first_last_bf16_layer(config, layer)):
            experts.is_first_microbatch = True  # as Megatron's schedules say at the start of a step
            y = step(experts)
        found.append([equal(y, results["e4m3"]), equal(y, results[None])])
    return found


class OwnExperts(SequentialMLP):
    """A user's experts."""


class OwnGroupedExperts(TEGroupedMLP):
    """A user's experts."""


def other_experts(*args, **kwargs):
    """Build a user's experts."""


def replaced():
    """By the way in which a spec holds experts: the error, or None where they were replaced."""
    spec = get_gpt_layer_local_spec(num_experts=4)
    mlp = spec.submodules.mlp
    kept = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    ways = {
        "Megatron's": kept.experts,
        "its class": SequentialMLP,
        "its class in a ModuleSpec": ModuleSpec(module=TEGroupedMLP),
        "its name": ModuleSpec(module=("megatron.core.transformer.moe.experts", "TEGroupedMLP")),
        "ours": FusedGroupedMLP,
        "a class": OwnExperts,
        "a class in a partial": partial(OwnGroupedExperts, submodules=None),
        "a class in a ModuleSpec": ModuleSpec(module=OwnExperts),
        "a name": ModuleSpec(module=("my_training.experts", "NamedExperts")),
        "a function": other_experts,
    }
    return {name: raised(lambda how=how: with_fused_experts(MoESubmodules(experts=how))) for name, how in ways.items()}


def config_changes():
    """On one rank: the results of several functions, by name."""
    functions = followed, refused, fields_read_in_silence, quick_gelus, first_and_last_layers, replaced
    return {function.__name__: function() for function in functions}


def trained(world_size, fp8_recipe, fp8_param, overlap):
    """Train three steps with Megatron's DDP and distributed optimizer; return losses, weights and gradient buffers."""
    ep = world_size > 1 and not overlap
    cell = EightBitCell(True, True, dtype="bfloat16", fp8_recipe=fp8_recipe, expert_parallel=ep, microbatches=2)
    config = cell_config(cell)
    config.fp8_param = fp8_param
    reuses = fp8_param and fp8_recipe == "mxfp8"
    shared = {"overlap_param_gather": overlap, "reuse_grad_buf_for_mxfp8_param_ag": reuses}
    of_ddp = {"overlap_grad_reduce": True, "fp8_param_gather": fp8_param, "bucket_size": 70000}
    training = Training(
        cell,
        config,
        seed=dist.get_rank() if ep else 0,
        of_ddp=of_ddp | shared,
        of_optimizer={"fp8_recipe": fp8_recipe} | shared,
    )
    model, ddp, optimizer = training.model, training.ddp, training.optimizer
    if overlap:  # as Megatron's training loop does in its first step, where there is nothing to gather
        ddp.disable_forward_pre_hook(param_sync=False)
    kept = []
    for i in range(3):
        train_step(model, ddp, cell)
        kept += [buffer.grad_data.clone() for buffer in ddp.buffers + ddp.expert_parallel_buffers]
        kept += [param.detach().clone() for param in model.parameters()]
        with as_on_gpu():
            optimizer.step()
            if reuses and overlap:  # as Megatron's training loop does, which alone knows when the buffer is free
                for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                    part._copy_main_params_to_param_buffer()
        if overlap and i == 0:
            ddp.enable_forward_pre_hook()
    return kept


def fp8_param():
    """By recipe and overlap: is a model with `fp8_param` equal to one without, bit for bit; did weights change."""
    found, world_size = {}, dist.get_world_size()
    for recipe, overlap in product(("blockwise", "mxfp8"), (False, True)):
        megatron_world.model_parallel(expert_model_parallel_size=2 if world_size > 1 and not overlap else 1)
        without, with_it = (trained(world_size, recipe, value, overlap) for value in (False, True))
        changed = not torch.equal(without[-1], without[-1 - len(without) // 3])
        found[f"{recipe} {overlap}"] = [equal(without, with_it), changed]
    return found
