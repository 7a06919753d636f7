"""State dicts, whole MoE layers, refusals: beside Megatron's own experts. Runs in a `megatron_world`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from fusedmlp.integrations.megatron import FusedGroupedMLP, with_fused_experts


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


def sequential(config):
    """Megatron's own experts, of plain torch layers."""
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return SequentialMLP(config.num_moe_experts // groups.ep.size(), config, submodules, groups)


def fused(config):
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return FusedGroupedMLP(config.num_moe_experts // groups.ep.size(), config, None, groups)


def weights_of(experts):
    """`[(fc1, fc2)]` by local expert."""
    if isinstance(experts, SequentialMLP):
        return [(e.linear_fc1.weight, e.linear_fc2.weight) for e in experts.local_experts]
    return list(zip(experts.linear_fc1.group("weight"), experts.linear_fc2.group("weight"), strict=True))


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


def checkpoint_round_trip(source, target, source_parallel, target_parallel, glu):
    """Saves one kind of experts, loads the other, perhaps with another expert parallel size; the same weights?"""
    folder = shared_folder()
    kinds = {"sequential": sequential, "fused": fused}
    kept = None
    for kind, parallel, step in ((source, source_parallel, "save"), (target, target_parallel, "load")):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=parallel)
        torch.manual_seed(17 if step == "save" else 99)
        if parallel > 1:
            torch.manual_seed(torch.initial_seed() + dist.get_rank())
        config = make_config(expert_model_parallel_size=parallel, gated_linear_unit=glu)
        experts = kinds[kind](config)
        state = experts.sharded_state_dict(prefix="mlp.experts.")
        if step == "save":
            dist_checkpointing.save(state, str(folder))
            kept = all_weights(experts)
        else:
            assert not all(torch.equal(a, b) for x, y in zip(kept, all_weights(experts), strict=True) for a, b in zip(x, y, strict=True))
            loaded = dist_checkpointing.load(state, str(folder))
            missing = experts.load_state_dict({k.removeprefix("mlp.experts."): v for k, v in loaded.items()}, strict=kind == "fused")
            assert not [k for k in missing.missing_keys if "_extra_state" not in k]
            for x, y in zip(kept, all_weights(experts), strict=True):
                for a, b in zip(x, y, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=0)
        parallel_state.destroy_model_parallel()


def checkpoints():
    count = 0
    sizes = [1] if dist.get_world_size() == 1 else [1, 2]
    for source, target in (("fused", "fused"), ("fused", "sequential"), ("sequential", "fused")):
        for source_parallel in sizes:
            for target_parallel in sizes:
                for glu in (True, False):
                    checkpoint_round_trip(source, target, source_parallel, target_parallel, glu)
                    count += 1
    return count


def build_layer(config, *, ours):
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    if ours:
        spec = with_fused_experts(spec)
    mlp = spec.submodules.mlp
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(mlp, config=config, pg_collection=groups)


if __name__ == "__main__":
    os._exit(0)
