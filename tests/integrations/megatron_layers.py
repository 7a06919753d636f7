"""State dicts, whole MoE layers and refusals, beside Megatron's own experts. Runs in a `world`."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, package_info, parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._pytree import tree_map

from bench.oracle import reference
from fusedmlp.integrations import megatron_config
from fusedmlp.integrations.megatron import FusedGroupedMLP, with_fused_experts
from fusedmlp.parts import ExpertTensors

VERSION = package_info.VERSION[:2]
if VERSION >= (0, 19):
    from megatron.core.models.common.utils import should_free_input
else:
    from megatron.core.models.gpt.fine_grained_callables import should_free_input


def make_config(**options):
    settings = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 12,
        "ffn_hidden_size": 12,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_dropout_fusion": False,
        "use_cpu_initialization": True,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
    }
    fusion = options.pop("gradient_accumulation_fusion", False)
    config = TransformerConfig(**settings | options)
    config.gradient_accumulation_fusion = fusion
    return config


def eight_bit_config(fp8_recipe, **options):
    """A config with fp8, set late: the constructor asks for TransformerEngine."""
    late = {name: options.pop(name) for name in [*options] if name.startswith(("fp8", "first_last"))}
    config = make_config(**options)
    for name, value in ({"fp8": "e4m3", "fp8_recipe": fp8_recipe} | late).items():
        setattr(config, name, value)
    return config


def overlapped(dispatcher, experts):
    """A config with fp8, set late, with so many experts on a rank, whose communication Megatron's schedule overlaps."""
    config = eight_bit_config("blockwise", num_moe_experts=2 * experts)
    config.expert_model_parallel_size, config.overlap_moe_expert_parallel_comm = 2, True
    if dispatcher != "alltoall":
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", dispatcher
    return config


def sequential(config):
    """Megatron's own experts, of plain torch layers."""
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return SequentialMLP(config.num_moe_experts // groups.ep.size(), config, submodules, groups)


def fused(config):
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return FusedGroupedMLP(config.num_moe_experts // groups.ep.size(), config, None, groups)


def grouped(config):
    """Our experts with one weight and one bias for all; set late: the constructor asks for TransformerEngine."""
    config.moe_single_grouped_weight = config.moe_single_grouped_bias = True
    return fused(config)


def weights_of(experts):
    """`[(fc1, fc2)]` by local expert."""
    if isinstance(experts, SequentialMLP):
        return [(e.linear_fc1.weight, e.linear_fc2.weight) for e in experts.local_experts]
    return list(zip(experts.linear_fc1().weight, experts.linear_fc2().weight, strict=True))


def shared_folder():
    """One folder for all ranks."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return Path(name[0])


def all_weights(experts):
    """Every expert's weights, of all ranks, in the order of their global index."""
    gathered = [None] * parallel_state.get_expert_model_parallel_world_size()
    mine = [tuple(w.detach().clone() for w in pair) for pair in weights_of(experts)]
    dist.all_gather_object(gathered, mine, group=parallel_state.get_expert_model_parallel_group())
    return [pair for part in gathered for pair in part]


def same(a, b):
    """True if two results of `all_weights` are equal."""
    return all(torch.equal(x, y) for pair in zip(a, b, strict=True) for x, y in zip(*pair, strict=True))


KINDS = {"sequential": sequential, "fused": fused, "grouped": grouped}


def save_checkpoint(source, parallel, glu):
    """Save a checkpoint; return its folder, and all weights in it."""
    folder = shared_folder()
    megatron_world.model_parallel(expert_model_parallel_size=parallel)
    torch.manual_seed(17 + (dist.get_rank() if parallel > 1 else 0))
    experts = KINDS[source](make_config(expert_model_parallel_size=parallel, gated_linear_unit=glu))
    dist_checkpointing.save(experts.sharded_state_dict(prefix="mlp.experts."), str(folder))
    kept = all_weights(experts)
    return folder, kept


def load_checkpoint(folder, kept, target, parallel, glu):
    """Load a checkpoint into other experts, perhaps with another expert-parallel size; assert equal weights."""
    megatron_world.model_parallel(expert_model_parallel_size=parallel)
    torch.manual_seed(99 + (dist.get_rank() if parallel > 1 else 0))
    experts = KINDS[target](make_config(expert_model_parallel_size=parallel, gated_linear_unit=glu))
    assert not same(kept, all_weights(experts))
    loaded = dist_checkpointing.load(experts.sharded_state_dict(prefix="mlp.experts."), str(folder))
    loaded = {name.removeprefix("mlp.experts."): tensor for name, tensor in loaded.items()}
    wrong = experts.load_state_dict(loaded, strict=target != "sequential")
    assert not [name for name in wrong.missing_keys if "_extra_state" not in name]
    assert same(kept, all_weights(experts))


def checkpoints():
    """Save and load in all combinations; return how many were loaded."""
    count = 0
    sizes = [1] if dist.get_world_size() == 1 else [1, 2]
    for source, glu, source_parallel in product(KINDS, (True, False), sizes):
        folder, kept = save_checkpoint(source, source_parallel, glu)
        for target, target_parallel in product(KINDS if source == "fused" else ["fused"], sizes):
            load_checkpoint(folder, kept, target, target_parallel, glu)
            count += 1
    return count


def moe_layer(config, *, ours):
    """A whole MoELayer: router, dispatcher, experts."""
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    mlp = (with_fused_experts(spec) if ours else spec).submodules.mlp
    return mlp(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())


def copy_weights(ours, theirs):
    """Copy the weights of Megatron's own layer into ours."""
    with torch.no_grad():
        ours.router.load_state_dict(theirs.router.state_dict())
        for mine, yours in zip(weights_of(ours.experts), weights_of(theirs.experts), strict=True):
            for a, b in zip(mine, yours, strict=True):
                a.copy_(b)


def compare_layers(sizes, dispatcher, options):
    """Compare outputs, input gradients and weight gradients of a step with those of Megatron's sequential experts."""
    megatron_world.model_parallel(**sizes)
    options = options | sizes | {"sequence_parallel": sizes.get("tensor_model_parallel_size", 1) > 1}
    config = make_config(moe_token_dispatcher_type=dispatcher, **options)
    torch.manual_seed(5)
    theirs, ours = moe_layer(config, ours=False), moe_layer(config, ours=True)
    copy_weights(ours, theirs)
    torch.manual_seed(7 + dist.get_rank())
    x, dy = torch.randn(6, 2, 8), torch.randn(6, 2, 8)  # [sequence, batch, hidden]
    results = []
    for layer in (theirs, ours):
        rows = x.clone().requires_grad_()
        y, bias = layer(rows)
        assert bias is None
        y.backward(dy)
        grads = [w.grad for pair in weights_of(layer.experts) for w in pair]
        results.append([y, rows.grad, layer.router.weight.grad, *grads])
    for got, want in zip(results[1], results[0], strict=True):
        want = torch.zeros_like(got) if want is None else want  # their experts without tokens have no gradient
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


# Without biases: Megatron's own sequential experts cannot run theirs backward without tensor parallelism.
LAYERS = {
    "swiglu": {},
    "gelu": {"gated_linear_unit": False, "activation_func": F.gelu},
    "squared relu": {"gated_linear_unit": False, "activation_func": squared_relu},
    "geglu": {"activation_func": F.gelu},
    "quick_geglu, clamped, offset": {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
    "top-1, probabilities on the input": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
    "router in float64": {"moe_router_dtype": "fp64"},
    "dropped above the capacity": {"moe_expert_capacity_factor": 0.5},
    "dropped above the capacity, padded to it": {
        "moe_expert_capacity_factor": 0.75,
        "moe_pad_expert_input_to_capacity": True,
    },
}
NEED_ALL_TO_ALL = list(LAYERS)[-2:]


PARALLEL = (
    {},
    {"expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2},
)


def layers():
    """Compare layers; return how many."""
    # The function does nothing with CPU tensors; the dispatcher needs numpy arrays, as it gets them for GPU tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = as_if_fetched
    count = 0
    for sizes in PARALLEL[:1] if dist.get_world_size() == 1 else PARALLEL[1:]:
        for dispatcher in ("allgather", "alltoall"):
            for name, options in LAYERS.items():
                if dispatcher == "allgather" and name in NEED_ALL_TO_ALL:
                    continue
                if len(sizes) > 1 and name not in (*list(LAYERS)[:2], *NEED_ALL_TO_ALL):
                    continue
                compare_layers(sizes, dispatcher, options)
                count += 1
    return count


def as_if_fetched(tensor, as_numpy=False, record_stream=False):
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def state_dict_names():
    """Names and shapes in the state dict of a small layer with biases, without and with fp8."""
    megatron_world.model_parallel()
    options = {"num_moe_experts": 2, "add_bias_linear": True}
    layers = [fused(make_config(**options)), fused(eight_bit_config("blockwise", **options))]
    return [{name: list(tensor.shape) for name, tensor in layer.state_dict().items()} for layer in layers]


def grouped_state_dict():
    """Names and shapes where one parameter has all experts; either layer loads the other's state dict."""
    options = {"num_moe_experts": 2, "add_bias_linear": True}
    apart, together = fused(make_config(**options)), grouped(make_config(**options))
    assert not same(all_weights(apart), all_weights(together))
    together.load_state_dict(apart.state_dict())
    assert same(all_weights(apart), all_weights(together))
    apart = fused(make_config(**options))
    apart.load_state_dict(together.state_dict())
    assert same(all_weights(apart), all_weights(together))
    return {name: list(tensor.shape) for name, tensor in together.state_dict().items()}


def recipes():
    """`recipe` and `wgrad` of experts by what their config says of fp8."""
    megatron_world.model_parallel()
    configs = {
        "unset": make_config(first_last_layers_bf16=True, fp8_recipe="mxfp8", fp8_wgrad=False),
        "blockwise": eight_bit_config("blockwise"),
        "mxfp8, wgrad in bf16": eight_bit_config("mxfp8", fp8_wgrad=False),
        "enumerated": eight_bit_config(Fp8Recipe.blockwise),
    }
    experts = {name: fused(config) for name, config in configs.items()}
    return {name: [layer.recipe, layer.wgrad] for name, layer in experts.items()}


def freed_inputs():
    """By dispatcher and experts on a rank: `[is it refused, does Megatron free the experts' input only with fp8]`."""
    megatron_world.model_parallel()
    found, dispatchers = {}, ["alltoall", "deepep", "hybridep", *(["ncclep"] if VERSION >= (0, 19) else [])]
    for dispatcher, experts in product(dispatchers, (1, 2)):
        config, freed = overlapped(dispatcher, experts), {}
        refused = raised(lambda config=config: fused(config)) is not None
        for config.fp8 in (None, "e4m3"):
            freed[config.fp8] = should_free_input("mlp", True, config, experts)
        found[f"{dispatcher} {experts}"] = [refused, freed["e4m3"] and not freed[None]]
    return found


def sharded_names():
    """This rank's sharded state dict, of 2 ranks: `{name: [key, global shape, global offset, replica id]}`."""
    megatron_world.model_parallel(expert_model_parallel_size=2)
    experts = fused(make_config(expert_model_parallel_size=2, gated_linear_unit=False))
    state = experts.sharded_state_dict(prefix="mlp.experts.")
    return {
        name: [shard.key, list(shard.global_shape), list(shard.global_offset), list(shard.replica_id)]
        for name, shard in state.items()
    }


HONOURED = {
    "default": {},
    "biases": {"add_bias_linear": True},
    "biases, probabilities on the input": {
        "add_bias_linear": True,
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
    },
    "no gate": {"gated_linear_unit": False, "activation_func": F.gelu, "activation_func_clamp_value": 0.1},
    "tanh gelu": {"activation_func": partial(F.gelu, approximate="tanh")},
    "clamped, offset": {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 0.2,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
    },
    "clamped swiglu": {"activation_func_clamp_value": 0.1},
    "fused biases": {"bias_activation_fusion": True},
    "latent size": {"moe_latent_size": 6},
    "ffn size of dense layers": {"moe_ffn_hidden_size": None, "ffn_hidden_size": 10},
    "clamped swiglu, fused": {"activation_func_clamp_value": 0.1, "bias_activation_fusion": True},
    "recomputed activation": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "one parameter, TransformerEngine's fused operators": {
        "moe_single_grouped_weight": True,
        "moe_single_grouped_bias": True,
        "add_bias_linear": True,
        "use_transformer_engine_op_fuser": True,
    },
}


def as_megatron_documents_it(config, experts, x, counts, probs):
    """The outputs of TEGroupedMLP's formula, in a loop over experts."""
    outputs = []
    for e, (x_e, p_e) in enumerate(zip(x.split(counts), probs.unsqueeze(-1).split(counts), strict=True)):
        fc1, fc2 = experts["linear_fc1.weight", e], experts["linear_fc2.weight", e]
        if config.moe_apply_probs_on_input:
            x_e, p_e = x_e * p_e, torch.ones_like(p_e)
        h = F.linear(x_e, fc1, experts.get(("linear_fc1.bias", e)))
        if config.gated_linear_unit:
            gate, linear = h.chunk(2, -1)
            clamp = config.activation_func_clamp_value
            if clamp is not None:
                gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
            a = config.activation_func(gate) * (linear + config.glu_linear_offset)
        else:
            a = config.activation_func(h)
        outputs.append(F.linear(a * p_e, fc2))
        if config.add_bias_linear:
            outputs[-1] = outputs[-1] + experts["linear_fc2.bias", e] * p_e
    return torch.cat(outputs)


def honoured():
    """Compare outputs and all gradients with the formula in float64, for each config of `HONOURED`; return how many."""
    megatron_world.model_parallel()
    for options in HONOURED.values():
        torch.manual_seed(3)
        config = make_config()
        for name, value in options.items():  # set late: the constructor asks for TransformerEngine for some
            setattr(config, name, value)
        experts, counts = fused(config), [3, 0, 5, 2]
        for name, param in experts.named_parameters():
            if "bias" in name:
                torch.nn.init.normal_(param)
            else:
                torch.nn.init.normal_(param, std=0.3)
        hidden = config.moe_latent_size or config.hidden_size
        x, dy, probs = torch.randn(10, hidden), torch.randn(10, hidden), torch.rand(10)
        results = []
        for dtype in (torch.float32, torch.float64):
            inputs = [t.to(dtype, copy=True).requires_grad_() for t in (x, probs)]
            if dtype == torch.float32:
                y, bias = experts(inputs[0], torch.tensor(counts), inputs[1])
                assert bias is None
                y.backward(dy)
                params = list(experts.parameters())
            else:
                loop = {
                    (name.rstrip("0123456789"), e): p.double().requires_grad_()
                    for name, param in experts.named_parameters()
                    for e, p in ([(int(name[-1]), param.detach())] if name[-1].isdigit() else enumerate(param.detach()))
                }
                y = as_megatron_documents_it(config, loop, inputs[0], counts, inputs[1])
                y.backward(dy.double())
                params = list(loop.values())
            grads = [p.grad for p in params]
            if config.add_bias_linear and getattr(config, "moe_single_grouped_bias", False):
                grads = [part for grad in grads for part in (grad if dtype == torch.float32 else [grad])]
            results.append([y, *(t.grad for t in inputs), *grads])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    return len(HONOURED)


def clamp_is_said():
    """The warning for a clamp of swiglu that TEGroupedMLP's fusion ignores."""
    config = make_config(bias_activation_fusion=True)
    config.activation_func_clamp_value = 0.1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused(config)
        (warning,) = caught
        config.moe_use_grouped_tensor = True  # a field of 0.20, which clamps with the fusion, too
        fused(config)
    assert caught == [warning]
    return str(warning.message)


def kept():
    """Elements of what forward keeps for backward, without and with recomputation of the activation."""
    megatron_world.model_parallel()
    found = {}
    for name, modules in {"default": [], "moe_act recomputed": ["moe_act"]}.items():
        config, saved = make_config(), {}
        if modules:
            config.recompute_granularity, config.recompute_modules = "selective", modules
        experts = fused(config)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.setdefault(t.data_ptr(), t), lambda t: t
        ):
            experts(torch.randn(10, 8).requires_grad_(), torch.tensor([3, 0, 5, 2]), torch.rand(10).requires_grad_())
        found[name] = sum(t.numel() for t in saved.values())
    return found


def raised(run):
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def newer_config(module="megatron.core.transformer.transformer_config", **options):
    """A config with two more fields, defined in a module of that name."""
    config = make_config()
    newer = dataclasses.make_dataclass(
        "Newer",
        [
            ("moe_squared_experts", bool, False),
            ("moe_expert_scales", list, dataclasses.field(default_factory=list)),
            ("moe_router_of_tomorrow", bool, False),
        ],
        bases=(type(config),),
        namespace={"__post_init__": lambda self: None, "__module__": module},
    )
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return newer(**own, **options, moe_router_of_tomorrow=True)


def fields_unknown():
    """Names of fields of this version that may be about experts and are not known."""
    return [field.name for field in megatron_config.unknown_fields(TransformerConfig)]


def expect(message, run):
    """Assert that an error with a message is raised."""
    said = raised(run)
    assert re.search(message, said or ""), (message, said)


UNSET = "expected it unset"
NOT_DELAYED = r"expected DistributedDataParallelConfig\(delay_wgrad_compute=True\) too"
# By field: a value that cannot be honoured, and the message. The first two are of experts with biases.
REFUSED = {
    "bias_dropout_fusion": (True, "bias_dropout_fusion: expected False with add_bias_linear"),
    "expert_tensor_parallel_size": (2, "add_bias_linear: expected expert_tensor_parallel_size 1, .* got 2"),
    "fp8": ("hybrid", "fp8: expected None or 'e4m3', the only .* got 'hybrid'"),
    "fp4": ("e2m1", f"fp4: {UNSET}, .* got 'e2m1'"),
    "use_te_activation_func": (True, f"use_te_activation_func: {UNSET}, .* got True"),
    "moe_mlp_glu_interleave_size": (32, f"moe_mlp_glu_interleave_size: {UNSET}, .* got 32"),
    "moe_ncclep_zero_copy": (True, f"moe_ncclep_zero_copy: {UNSET}"),
    "moe_dispatch_fwd_dtype": ("mxfp8", "moe_dispatch_fwd_dtype: expected 'bf16', .* takes rows in .* got 'mxfp8'"),
    "moe_combine_bwd_dtype": ("mxfp8", "moe_combine_bwd_dtype: expected 'bf16', .* takes gradients .* got 'mxfp8'"),
    "activation_func_fp8_input_store": (True, f"activation_func_fp8_input_store: {UNSET}"),
    "overlap_dispatch_backward_with_experts_wgrad": (True, "overlap_dispatch_backward_with_experts_wgrad: "),
    "activation_func": (
        torch.tanh,
        r"activation_func: expected a gated activation that fusedmlp has \(.*\); got .*tanh",
    ),
    "moe_apply_probs_on_input": (True, "moe_apply_probs_on_input: expected False, or moe_router_topk 1; got 2"),
    "quant_recipe": ("a recipe", f"quant_recipe: {UNSET}"),
    "moe_paged_stash": (True, f"moe_paged_stash: {UNSET}, .* got True"),
    "expert_gtp_weight_remat_size": (2, "expert_gtp_weight_remat_size: expected 1, .* got 2"),
    "transformer_impl": ("inference_optimized", "transformer_impl: expected 'local' or .* got 'inference_optimized'"),
}


def refusals():
    """Assert that every config that cannot be honoured is refused, and uses that would give a wrong gradient."""
    megatron_world.model_parallel()
    for i, (name, (value, message)) in enumerate(REFUSED.items()):
        config = make_config(add_bias_linear=i < 2)
        setattr(config, name, value)
        expect(rf"config\.{message}", lambda config=config: fused(config))
    for name, value, default in (("moe_squared_experts", True, "False"), ("moe_expert_scales", [2.0], r"\[\]")):
        config = newer_config(**{name: value})
        message = rf"config\.{name}: expected {default}, .* does not know this field .* got {re.escape(str(value))}"
        expect(message, lambda config=config: fused(config))
    provider = dataclasses.make_dataclass(
        "Provider",
        [("moe_squared_experts", bool, True)],
        bases=(type(newer_config()),),
        namespace={"__module__": "my_training", "__post_init__": lambda self: None},
    )
    own = {field.name: getattr(newer_config(), field.name) for field in dataclasses.fields(newer_config())}
    del own["moe_squared_experts"]
    expect(r"config\.moe_squared_experts: expected False, .* got True", lambda: fused(provider(**own)))  # its default
    fused(newer_config())
    fused(newer_config("my_training", moe_squared_experts=True))  # a field of one's own config
    expect(
        r"config\.overlap_moe_expert_parallel_comm: expected False with fp8 and one expert .* True",
        lambda: fused(overlapped("alltoall", 1)),
    )
    expect(
        r"config\.first_last_layers_bf16: expected False .* TransformerEngine .* got True",
        lambda: fused(eight_bit_config("blockwise", first_last_layers_bf16=True)),
    )
    for recipe in ("tensorwise", "delayed", "custom", Fp8Recipe.delayed):
        message = rf"config\.fp8_recipe: expected 'blockwise' or 'mxfp8', .* got {re.escape(repr(recipe))}"
        expect(message, lambda recipe=recipe: fused(eight_bit_config(recipe)))
    config = make_config()
    config.fine_grained_activation_offloading, config.offload_modules = True, ["moe_act"]
    with mock.patch.object(offloading, "FineGrainedActivationOffloadingInterface", object):  # of another version
        message = r"config\.offload_modules: expected none .* before 0\.19, .* got \['moe_act'\]"
        expect(message, lambda: fused(config))
    message = r"config\.activation_func: expected a gated activation .* \(.*\); got .*squared_relu"
    expect(message, lambda: fused(make_config(activation_func=squared_relu)))
    config = make_config(gradient_accumulation_fusion=True)
    config.delay_wgrad_compute = True
    experts = fused(config)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), experts)
    x, counts, probs = torch.randn(6, 8), torch.tensor([3, 0, 1, 2]), torch.rand(6)
    expect(NOT_DELAYED, lambda: ddp(x, counts, probs))
    experts.linear_fc1 = Around(experts.linear_fc1)
    expect(NOT_DELAYED, lambda: ddp(x, counts, probs))
    with torch.no_grad():
        ddp(x, counts, probs)

    experts = grouped(make_config())
    experts.linear_fc1.weight.__fsdp_param__ = True
    expect("expected False under Megatron-FSDP, .* got True", lambda: experts(x, counts, probs))
    experts = fused(make_config(gradient_accumulation_fusion=True))
    message = (
        r"linear_fc1\.weight0: .* expects a main_grad attribute on the parameter; got none \(wrap the model in "
        r"megatron\.core\.distributed\.DistributedDataParallel, or set config\.gradient_accumulation_fusion=False\)$"
    )
    expect(message, lambda: experts(x, counts, probs))
    experts = fused(make_config(gradient_accumulation_fusion=True))
    for weight, _ in weights_of(experts):
        weight.main_grad = torch.zeros_like(weight)
    experts.linear_fc1.weight3.main_grad = torch.zeros(2)
    message = r"linear_fc1\.weight3: expected main_grad of shape \(24, 8\); got \(2,\)"
    expect(message, lambda: experts(x, counts, probs)[0].sum().backward())
    small = fused(eight_bit_config("mxfp8"))
    message = r"linear_fc1\.weight: expected multiples of 32 features, the blocks of .*mxfp8'; got 24"
    expect(message, lambda: small(x, counts, probs))
    message = r"Only transformer-engine>=1\.7\.0 supports MoE FP8 training"  # Megatron's own
    expect(message, lambda: make_config(fp8="e4m3", fp8_recipe="blockwise"))
    message = "_extra_state: expected no fp8 state; got 3 bytes"
    expect(message, lambda: experts.linear_fc1.set_extra_state(torch.ones(3, dtype=torch.uint8)))
    message = "layer_spec: expected a Megatron spec that holds a MoELayer, .* got "
    expect(message, lambda: with_fused_experts(get_gpt_layer_local_spec()))


def order_of_hooks():
    """The order in which `backward_dw` tells DDP of the layers' gradients, and whether each weight then has one."""
    megatron_world.model_parallel()
    config, order = make_config(), []
    config.delay_wgrad_compute = True
    experts = fused(config)
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(experts, name)
        setattr(experts, name, Around(linear))
        linear.register_wgrad_accumulation_and_reduce_hooks(
            lambda name=name, linear=linear: order.append([name, all(w.grad is not None for w in linear.parameters())])
        )
    experts(torch.randn(6, 8), torch.tensor([3, 0, 1, 2]), torch.rand(6))[0].sum().backward()
    assert order == []
    experts.backward_dw()
    return order


class LikeTransformerEngine(torch.nn.Module):
    """Stands for TransformerEngine's grouped linear layer as it is built: its parameters, and the numbers it draws."""

    def __init__(
        self, experts, in_features, out_features, *, config, init_method, pg_collection, tp_comm_buffer_name, **_
    ):
        super().__init__()
        size, tp = [out_features, in_features], pg_collection.expt_tp.size()
        size[tp_comm_buffer_name == "fc2"] //= tp
        for i in range(experts):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype)))
        tracker = random.get_cuda_rng_tracker()
        for weight in self.parameters():
            name = random.get_expert_parallel_rng_tracker_name()
            with tracker.fork(name) if tracker.is_initialized() else nullcontext(), torch.no_grad():
                init_method(weight)


def cpu_rng_state(*_, **__):
    return torch.get_rng_state()


def fresh_weights():
    """Configs with which fresh weights are those of `TEGroupedMLP`, or of `SequentialMLP`, with equal seeds."""
    found = {"TEGroupedMLP": [], "SequentialMLP": []}
    tp = dist.get_world_size()
    megatron_world.model_parallel(tensor_model_parallel_size=tp, expert_tensor_parallel_size=tp)
    sizes = {"tensor_model_parallel_size": tp, "expert_tensor_parallel_size": tp, "sequence_parallel": tp > 1}
    linear = LikeTransformerEngine
    for device, dtype in product(("CPU", "GPU"), (torch.float32, torch.bfloat16)):
        config = make_config(use_cpu_initialization=device == "CPU", params_dtype=dtype, **sizes)
        builds = {
            "ours": fused,
            "TEGroupedMLP": lambda config: TEGroupedMLP(
                4,
                config,
                MLPSubmodules(linear_fc1=linear, linear_fc2=linear),
                ProcessGroupCollection.use_mpu_process_groups(),
            ),
            "SequentialMLP": sequential,
        }
        weights = {}
        for who, build in builds.items():
            random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
            with (
                mock.patch.object(random, "_get_cuda_rng_state", cpu_rng_state),
                mock.patch.object(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
                mock.patch.multiple(torch.cuda, manual_seed=torch.manual_seed, get_rng_state=torch.get_rng_state),
            ):
                torch.manual_seed(3)
                if device == "GPU":
                    random.model_parallel_cuda_manual_seed(3)
                experts = build(config)
                random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
            if who == "TEGroupedMLP":
                names = [f"linear_fc{i}.weight{e}" for e in range(4) for i in (1, 2)]
                weights[who] = [experts.get_parameter(name) for name in names]
            else:
                weights[who] = [weight for pair in weights_of(experts) for weight in pair]
        for who in found:
            if all(torch.equal(a, b) for a, b in zip(weights["ours"], weights[who], strict=True)):
                found[who].append(f"{device} {dtype}")
    return found


def shards_of_fresh_weights():
    """Tell whether shards that a CPU fills are parts of one matrix, for each weight."""
    wholes = {}
    for tp in (1, 2):
        sizes = {"tensor_model_parallel_size": tp, "expert_tensor_parallel_size": tp}
        megatron_world.model_parallel(**sizes)
        torch.manual_seed(3)
        pairs = weights_of(fused(make_config(**sizes, sequence_parallel=tp > 1)))
        wholes[tp] = [weight.detach() for pair in pairs for weight in pair]
    shards = [[torch.empty_like(shard) for _ in range(2)] for shard in wholes[2]]
    for parts, shard in zip(shards, wholes[2], strict=True):
        dist.all_gather(parts, shard.contiguous())
    return [
        torch.equal(torch.cat(parts, i % 2), whole)
        for i, (parts, whole) in enumerate(zip(shards, wholes[1], strict=True))
    ]


class Around(torch.nn.Module):
    """A wrapper, as adapters are; `change` gets and returns what the layer returns."""

    def __init__(self, to_wrap, change=lambda found: found):
        super().__init__()
        self.to_wrap, self.change = to_wrap, change

    def forward(self, *args):
        return self.change(self.to_wrap(*args))


class Twice(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrize(experts, name):
    for e in range(4):
        torch.nn.utils.parametrize.register_parametrization(getattr(experts, name), f"weight{e}", Twice())


def doubled(found):
    return ExpertTensors([2 * weight for weight in found.weight], found.bias)


def views(found):
    """Map a result as Megatron-FSDP's hooks do, to tell one module's result from another's."""
    return tree_map(lambda t: t.view_as(t) if torch.is_tensor(t) else t, found)


def double_result(found):
    return 2 * found[0], found[1]


# Changes of a linear layer, and whether the weights that the experts compute with are then twice as great.
EFFECTIVE = {
    "parametrizations": (parametrize, True),
    "a wrapper that computes weights": (lambda e, n: setattr(e, n, Around(getattr(e, n), doubled)), True),
    "a hook that computes weights": (
        lambda e, n: getattr(e, n).register_forward_hook(lambda m, x, y: doubled(y)),
        True,
    ),
    "a wrapper": (lambda e, n: setattr(e, n, Around(getattr(e, n))), False),
    "a hook that looks": (lambda e, n: getattr(e, n).register_forward_hook(lambda m, x, y: None), False),
    "a hook of Megatron-FSDP": (lambda e, n: getattr(e, n).register_forward_hook(lambda m, x, y: views(y)), False),
}
WITHOUT_ROWS = {
    "a hook on outputs": lambda e, n: getattr(e, n).register_forward_hook(lambda m, x, y: double_result(y)),
    "a hook on rows": lambda e, n: getattr(e, n).register_forward_pre_hook(lambda m, x: (2 * x[0], x[1])),
    "a hook on gradients": lambda e, n: getattr(e, n).register_full_backward_hook(lambda m, dx, dy: dx),
    "a hook before gradients": lambda e, n: getattr(e, n).register_full_backward_pre_hook(lambda m, dy: dy),
    "an adapter": lambda e, n: setattr(e, n, Around(getattr(e, n), double_result)),
    "a dense layer": lambda e, n: setattr(e, n, torch.nn.Linear(8, 8)),
}


@contextmanager
def offloading_manager():
    """Megatron's own manager of offloading, which takes tensors of the CPU for those of a GPU; yields what it sends."""
    sent = []
    handler = offloading.ChunkOffloadHandler
    offload = handler.offload

    def noting(self, tensor, **options):
        sent.append([*tensor.shape])
        return offload(self, tensor, pin_memory=False, use_cpu_pool=False)

    with (
        mock.patch.object(torch.cuda, "Event"),
        mock.patch.object(torch.Tensor, "record_stream", create=True),
        mock.patch.object(handler, "_can_manage_tensor_for_offload", staticmethod(lambda t: type(t) is torch.Tensor)),
        mock.patch.object(handler, "offload", noting),
        mock.patch.object(offloading, "OffloadTensorPool"),
        mock.patch.object(transformer_engine, "cpu_offload"),
    ):
        offloading.PipelineOffloadManager.reset_instance()
        yield sent
        offloading.PipelineOffloadManager.OFFLOAD_MGR = None


def offloaded():
    """By `offload_modules`: shapes that two layers send in two steps, and how often their input is freed.

    Gradients must stay the same. None before 0.19, where all this is refused.
    """
    if not hasattr(offloading.FineGrainedActivationOffloadingInterface, "group_offload"):
        return None
    megatron_world.model_parallel()
    interface, found = offloading.FineGrainedActivationOffloadingInterface, {}
    kinds = [["expert_fc1"], ["moe_act"], ["expert_fc1", "moe_act"], ["fused_group_mlp"]]
    for modules in [None, *kinds]:
        torch.manual_seed(3)
        layers = [fused(make_config(add_bias_linear=True)) for _ in range(2)]
        if modules:
            for layer in layers:
                layer.config.fine_grained_activation_offloading, layer.config.offload_modules = True, modules
        results, freed = [], 0
        with offloading_manager() as sent:
            for _ in range(2):
                if modules:
                    interface.init_chunk_handler(0, None, None, 16, 0, 1.0)
                rows, probs = torch.randn(10, 8).requires_grad_(), torch.rand(10).requires_grad_()
                y = rows.tanh()
                for layer in layers:
                    dispatched = y * 1
                    y, _ = layer(dispatched, torch.tensor([3, 0, 5, 2]), probs)
                    freed += dispatched.untyped_storage().size() == 0
                y.square().sum().backward()
                results += [rows.grad, probs.grad]
                if modules:
                    interface.reset()
        results += [param.grad for layer in layers for param in layer.parameters()]
        if not modules:
            want = results
            continue
        for got, right in zip(results, want, strict=True):
            torch.testing.assert_close(got, right)
        found["+".join(modules)] = sent, freed
    return found


def effects_on_linears():
    """Compare with float64 what is put on a linear layer and has an effect; return how many, and errors of the rest."""
    megatron_world.model_parallel()
    counts, count, errors = [3, 0, 5, 2], 0, {}
    for name, (kind, (put, doubles)) in product(("linear_fc1", "linear_fc2"), EFFECTIVE.items()):
        torch.manual_seed(3)
        experts, x, dy, probs = fused(make_config()), torch.randn(10, 8), torch.randn(10, 8), torch.rand(10)
        if "that computes" not in kind and kind != "parametrizations":
            experts.config.gradient_accumulation_fusion = True  # which takes parameters alone
            for param in experts.parameters():
                param.main_grad = torch.zeros_like(param)
        params = list(experts.parameters())
        loop = [[w.detach().double().requires_grad_() for w in pair] for pair in weights_of(experts)]
        put(experts, name)
        y, _ = experts(x, torch.tensor(counts), probs)
        y.backward(dy)
        factors = [1 + doubles * (name == linear) for linear in ("linear_fc1", "linear_fc2")]
        want = []
        for pair, rows, prob in zip(loop, x.double().split(counts), probs.double().split(counts), strict=True):
            want.append(reference.expert(rows, *(f * w for f, w in zip(factors, pair, strict=True)), prob).y)
        want = torch.cat(want)
        want.backward(dy.double())
        grads = [getattr(p, "main_grad", p.grad) for p in params]
        pairs = [(y, want), *zip(grads, [pair[i].grad for i in range(2) for pair in loop], strict=True)]
        for got, right in pairs:
            torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6, msg=f"{kind} on {name}")
        count += 1
    for name, (kind, put) in product(("linear_fc1", "linear_fc2"), WITHOUT_ROWS.items()):
        experts = fused(make_config())
        put(experts, name)
        errors[f"{kind}: {name}"] = raised(lambda e=experts: e(x, torch.tensor(counts), probs))
    linear = fused(make_config()).linear_fc1
    errors["rows: ExpertLinear"] = raised(lambda: linear(x, counts))
    return count, errors


def config_and_state():
    """On one rank: the results of several functions, by name."""
    functions = fields_unknown, freed_inputs, honoured, clamp_is_said, kept, refusals, order_of_hooks, recipes
    functions += state_dict_names, grouped_state_dict, effects_on_linears, fresh_weights, offloaded
    return {function.__name__: function() for function in functions}


def layers_and_checkpoints():
    """How many were compared, and on several ranks the names of sharded tensors."""
    functions = [layers, checkpoints]
    if dist.get_world_size() > 1:
        functions += sharded_names, fresh_weights, shards_of_fresh_weights
    return {function.__name__: function() for function in functions}
