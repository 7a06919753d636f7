"""A few training steps of a small GPT with Megatron-core: its DDP, its optimizer, and fusedmlp's experts.

    python examples/megatron_pretrain_step.py [--steps 5] [--plain] [--device cuda]

One process, on a GPU or on the CPU. Lines that put in fusedmlp's experts are marked "ours".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F


def use_cpu() -> None:
    """Replace the GPU, its streams and tensors by stand-ins on the CPU, as Megatron-core asks for them throughout."""
    stream = mock.Mock()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: stream
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.FloatTensor, torch.cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, partial(_on_cpu, getattr(torch, name)))


def _on_cpu(make: Callable[..., torch.Tensor], *args: object, **options: object) -> torch.Tensor:
    return make(*args, **options | ({"device": "cpu"} if options.get("device") == "cuda" else {}))


def main() -> list[float]:
    """Train; print and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="weight gradients through autograd, for comparison")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    if on_cpu:
        use_cpu()

    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    from fusedmlp.integrations.megatron import with_fused_experts  # ours

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 uses the name without TransformerEngine, too

    backend, store = "gloo" if on_cpu else "nccl", torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    if on_cpu:
        CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    else:
        model_parallel_cuda_manual_seed(0)

    vocabulary, length, batch, micro_batches = 64, 32, 4, 2
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=on_cpu,
    )
    spec = with_fused_experts(get_gpt_layer_local_spec(num_experts=config.num_moe_experts))  # ours
    model = GPTModel(config, spec, vocabulary, length, position_embedding_type="rope").to(args.device)
    # Set only now, for the experts: Megatron's own linear layers read it when they are made, and would then need Apex.
    config.gradient_accumulation_fusion = not args.plain
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=0.0 if on_cpu else 1.0), [ddp]
    )

    # Data that can be learned: each token is the one before it plus a step, the same throughout a sequence.
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(length, device=args.device).expand(batch, -1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=args.device).triu(1)
    losses = []
    for step in range(args.steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for i in range(micro_batches):
            start, stride = torch.randint(vocabulary, (2, batch, 1), generator=generator)
            text = ((start + (1 + stride % 3) * torch.arange(length + 1)) % vocabulary).to(args.device)
            last = i == micro_batches - 1
            with nullcontext() if last else ddp.no_sync():
                loss = ddp(text[:, :-1], position, causal, labels=text[:, 1:]).mean() / micro_batches
                loss.backward()
            total += float(loss)
        finalize_model_grads([ddp])
        optimizer.step()
        losses.append(total)
        print(f"step {step + 1}: loss {total:.4f}", flush=True)
    torch.distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
