"""Megatron-core: a GPT with its DDP and its distributed optimizer; experts of Megatron's own, and `FusedGroupedMLP`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.stacks.training import Training
from bench.gpu.stacks.widths import LAYERS, LEARNING_RATE, VOCABULARY, Widths


def variants(widths: Widths, device: str, compiled: bool) -> dict[str, Callable[[], Training]]:
    """Trainings by the name of the experts; the first has Megatron's own: TransformerEngine's, or one after another."""
    by_te = device == "cuda" and find_spec("transformer_engine") is not None
    own = "TEGroupedMLP" if by_te else "SequentialMLP"
    return {name: partial(_build, widths, device, name == "fusedmlp", by_te) for name in (own, "fusedmlp")}


def _build(widths: Widths, device: str, fused: bool, by_te: bool) -> Training:
    as_on_gpu: Callable[[], AbstractContextManager[Any]] = nullcontext
    if device == "cpu":
        from integrations.megatron_optimizer_checkpoints import as_on_gpu  # before Megatron asks for a GPU
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from fusedmlp.integrations.megatron import with_fused_experts

    if not torch.distributed.is_initialized():
        backend, store = "nccl" if device == "cuda" else "gloo", torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        if device == "cpu":
            CudaRNGStatesTracker.fork = lambda *_: nullcontext()
        else:
            model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=widths.hidden,
        num_attention_heads=widths.heads,
        num_query_groups=widths.kv_heads,
        kv_channels=widths.head_dim,
        num_moe_experts=widths.experts,
        moe_router_topk=widths.top_k,
        moe_ffn_hidden_size=widths.ffn,
        moe_grouped_gemm=by_te,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        use_cpu_initialization=device == "cpu",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    if by_te:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(widths.experts, moe_grouped_gemm=True)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(widths.experts, normalization="RMSNorm")
    if fused:
        spec = with_fused_experts(spec)
    model = GPTModel(config, spec, VOCABULARY, widths.length, position_embedding_type="rope")
    model = model.to(device, torch.bfloat16)
    _initialise(model)
    # Set only now, for the experts: Megatron's own linear layers read it when they are made, and would then need Apex.
    config.gradient_accumulation_fusion = fused
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), model
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=LEARNING_RATE, bf16=True, use_distributed_optimizer=True, clip_grad=0.0
    )
    with as_on_gpu():
        optimizer = get_megatron_optimizer(settings, [ddp])
    position = torch.arange(widths.length, device=device).expand(widths.batch, -1)
    causal = torch.ones(1, 1, widths.length, widths.length, dtype=torch.bool, device=device).triu(1)

    def step(text: Sequence[Tensor], update: bool) -> float:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for ids in text:
            with nullcontext() if ids is text[-1] else ddp.no_sync():
                loss = ddp(ids[:, :-1], position, causal, labels=ids[:, 1:]).mean() / len(text)
                loss.backward()
            total += loss.detach()
        finalize_model_grads([ddp])
        if update:
            with as_on_gpu():
                optimizer.step()
        return float(total)

    return Training(step, [layer.mlp.experts for layer in model.decoder.layers])


def _initialise(model: nn.Module) -> None:
    """Fill weights so that activations stay at 1, by their names, which differ between experts only in one way."""
    for name, parameter in model.named_parameters():
        of_expert = re.sub(r"local_experts\.(\d+)\.(linear_fc.\.weight)", r"\2\1", name)
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(of_expert.encode()))
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
