"""Prints the places of the experts' `main_grad` in Megatron-core's own DDP, for published models at full size.

    PYTHONPATH=tests python -m integrations.megatron_buffers [--json]

Models are `GPTModel`s on the meta device, in process groups that do not communicate: DDP computes every place in its
buffers as on a GPU, and takes no memory. A buffer itself starts at a multiple of 512 bytes on a GPU, of 64 on the CPU.
"""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import gcd

import support.megatron_world  # noqa: F401  before Megatron asks for a GPU
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedmlp.integrations.megatron import FusedGroupedMLP, with_fused_experts
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors

LAYERS = 3  # of each model: places repeat
# Sizes by the models' own config.json files.
MODELS = {
    "Qwen3-30B-A3B": {
        "vocabulary": 151936,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "qk_layernorm": True,
        "num_moe_experts": 128,
        "moe_ffn_hidden_size": 768,
        "moe_router_topk": 8,
    },
    "DeepSeek-V3": {
        "vocabulary": 129280,
        "hidden_size": 7168,
        "ffn_hidden_size": 18432,
        "num_attention_heads": 128,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "qk_layernorm": True,
        "num_moe_experts": 256,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "Mixtral-8x7B": {
        "vocabulary": 32000,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
    },
    "gpt-oss-20b": {
        "vocabulary": 201088,
        "hidden_size": 2880,
        "ffn_hidden_size": 2880,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "kv_channels": 64,
        "num_moe_experts": 32,
        "moe_router_topk": 4,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
    },
}

COMMON = {
    "num_layers": LAYERS,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "bias_dropout_fusion": False,
    "normalization": "RMSNorm",
    "moe_token_dispatcher_type": "alltoall",
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "bf16": True,
    "perform_initialization": False,
}
DISTRIBUTED = {"use_distributed_optimizer": True}
PADDED = DISTRIBUTED | {"pad_buckets_for_high_nccl_busbw": True}
# Ranks, expert parallel size, fields of DDP's config beside overlap_grad_reduce, which divides buffers into buckets.
LAYOUTS = (
    (8, 1, {}),
    (64, 8, {}),
    (8, 1, DISTRIBUTED),
    (64, 8, DISTRIBUTED),
    (24, 8, DISTRIBUTED),
    (8, 1, PADDED),
    (64, 8, PADDED),
)


@contextmanager
def world(ranks, expert_parallel):
    """Be rank 0 of process groups without other ranks; tensors for the current GPU are on the meta device."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_parallel, create_gloo_process_groups=False
    )
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def groups(sizes, expert_parallel, device="meta", odd=False, **options):
    """The `main_grad`s of every fc1 and every fc2 of a model under Megatron's DDP.

    Args:
        sizes: as in `MODELS`.
        expert_parallel: its size.
        device: of the model and of DDP's buffers.
        odd: give every layer one more parameter, of one element.
        options: fields of `DistributedDataParallelConfig`.
    """
    sizes = COMMON | sizes
    vocabulary, latent = sizes.pop("vocabulary"), sizes.get("multi_latent_attention", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(
        expert_model_parallel_size=expert_parallel, **sizes
    )
    spec = with_fused_experts(
        get_gpt_layer_local_spec(config.num_moe_experts, False, config.qk_layernorm, latent, normalization="RMSNorm")
    )
    if latent:  # without TransformerEngine Megatron has none for it, and it has no parameters
        spec.submodules.self_attention.submodules.core_attention = IdentityOp
    torch.cuda.current_device = lambda: device
    with torch.device(device):
        model = GPTModel(config, spec, vocabulary, 4096, share_embeddings_and_output_weights=False)
    for layer in model.modules() if odd else ():
        if isinstance(layer, TransformerLayer):
            layer.scale = torch.nn.Parameter(torch.ones(1, dtype=config.params_dtype, device=device))
    model = Float16Module(config, model)
    settings = {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True} | options
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**settings), model)
    linears = [
        linear
        for module in ddp.modules()
        if isinstance(module, FusedGroupedMLP)
        for linear in (module.linear_fc1, module.linear_fc2)
    ]
    return [[weight.main_grad for weight in linear.group("weight")] for linear in linears]


def summary(places):
    """Byte addresses, a list for each group: values modulo 16, a divisor of all, and the number of even groups."""
    every = [address for group in places for address in group]
    factor = gcd(*every)
    even = sum(len({b - a for a, b in pairwise(group)}) <= 1 for group in places)
    return {"modulo_16": sorted({address % 16 for address in every}), "multiple_of": factor & -factor, "even": even}


def row(name, ranks, expert_parallel, **options):
    """The summary of one model in one layout; `groups` counts every layer's fc1 and fc2."""
    places = [
        [g.storage_offset() * g.element_size() for g in group]
        for group in groups(MODELS[name], expert_parallel, **options)
    ]
    about = {"model": name, "ranks": ranks, "expert_parallel": expert_parallel, "ddp": options}
    return about | summary(places) | {"groups": len(places)}


def rows(layouts=LAYOUTS, **options):
    """The rows of every model in these layouts."""
    for ranks, expert_parallel, settings in layouts:
        with world(ranks, expert_parallel):
            for name in MODELS:
                yield row(name, ranks, expert_parallel, **settings, **options)


def table(found):
    """Lines of a table with a column for each model: the bytes of which places are multiples, and the even groups."""
    lines = [["ranks", "EP", "beside `overlap_grad_reduce`", *MODELS]]
    for first in range(0, len(found), len(MODELS)):
        of_models = found[first : first + len(MODELS)]
        settings = ", ".join(f"`{name}`" for name in of_models[0]["ddp"]) or "nothing"
        cells = [f"{each['multiple_of']} B, {each['even']}/{each['groups']}" for each in of_models]
        lines.append([str(of_models[0]["ranks"]), str(of_models[0]["expert_parallel"]), settings, *cells])
    return [f"| {' | '.join(line)} |" for line in lines]


def in_memory():
    """In memory of the CPU, as wgrad sees it: `[are there descriptors, are addresses aligned]` for every group.

    Small layers whose fc2 weights are odd multiples of 64 elements, in buckets of three of them or more.
    """
    sizes = {
        "vocabulary": 128,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 20,
        "ffn_hidden_size": 20,
        "moe_router_topk": 2,
    }
    cases = {
        "DDP": (1, {}),
        "DDP, odd": (1, {"odd": True}),
        "distributed, odd": (1, DISTRIBUTED | {"odd": True}),
        "distributed, buckets": (1, DISTRIBUTED | {"bucket_size": 700}),
        "distributed, buckets, EP": (2, DISTRIBUTED | {"bucket_size": 700}),
        "distributed, a bucket for each weight, EP": (2, DISTRIBUTED | {"bucket_size": 320}),
        "distributed, no buckets": (1, DISTRIBUTED | {"overlap_grad_reduce": False}),
    }
    found = {}
    for name, (expert_parallel, options) in cases.items():
        with world(4, expert_parallel):
            every = groups(sizes, expert_parallel, device="cpu", **options)
            for grad in [grad for group in every for grad in group]:
                assert grad.data_ptr() % 64 == grad.storage_offset() * grad.element_size() % 64
            experts = [ExpertTensors.of(group, 2) for group in every]
            found[name] = [[each.table is None, each.aligned] for each in experts]
    return found


def main():
    """Print the table, or all that was found as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    found = list(rows())
    if as_json:
        print(json.dumps({"rows": found, "table": table(found), "in_memory": in_memory()}))
    else:
        print("\n".join(table(found)))


if __name__ == "__main__":
    main()
