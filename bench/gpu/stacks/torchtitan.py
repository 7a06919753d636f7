"""torchtitan: its Qwen3 under FSDP2 on one rank, fp32 weights that compute in bfloat16; its own experts, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention

from bench.gpu.stacks.training import Training
from bench.gpu.stacks.widths import LAYERS, LEARNING_RATE, VOCABULARY, Widths
from fusedmlp.integrations.torchtitan import FusedExpertsConverter


def variants(widths: Widths, device: str, compiled: bool) -> dict[str, Callable[[], Training]]:
    """Trainings by the name of the experts; the first has torchtitan's own."""
    converters: dict[str, list[Any]] = {"GroupedExperts": [], "fusedmlp": [FusedExpertsConverter.Config()]}
    return {name: partial(_build, widths, device, compiled, each) for name, each in converters.items()}


def _build(widths: Widths, device: str, compiled: bool, converters: list[Any]) -> Training:
    config = _config(widths)
    for converter in converters:
        config = converter.build().convert(config)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    layers = [*model.layers.values()]
    _shard(model, layers, device)
    if compiled:
        for layer in layers:
            layer.compile(backend="inductor" if device == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device == "cuda")
    positions = torch.arange(widths.length, device=device).expand(widths.batch, -1)

    def step(text: Sequence[Tensor], update: bool) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for ids in text:
            logits = model(ids[:, :-1], attention_masks=None, positions=positions)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / len(text)
            loss.backward()
            total += loss.detach()
        if update:
            optimizer.step()
        return float(total)

    return Training(step, [layer.moe.routed_experts.inner_experts for layer in layers])


def _config(widths: Widths) -> Any:
    """The configuration of "30B-A3B" with these widths; attention that has a backward on the CPU, too."""
    config: Any = qwen3.model_registry("30B-A3B").model
    config.layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS,
        dim=widths.hidden,
        n_heads=widths.heads,
        n_kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        moe_hidden_dim=widths.ffn,
        num_experts=widths.experts,
        top_k=widths.top_k,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=widths.head_dim, max_seq_len=widths.length, theta=1e6),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dim, config.vocab_size, config.norm = widths.hidden, VOCABULARY, qwen3._qwen3_norm(widths.hidden)
    config.tok_embeddings.embedding_dim = config.lm_head.in_features = widths.hidden
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCABULARY
    return config


def _shard(model: Any, layers: Sequence[Any], device: str) -> None:
    if not torch.distributed.is_initialized():
        backend, store = "nccl" if device == "cuda" else "gloo", torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = torch.distributed.init_device_mesh(device, (1,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
