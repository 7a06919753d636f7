"""Megatron-FSDP: prevent what it would do wrong to gradients that kernels add into its buffers, or refuse to run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

_fsdps: weakref.WeakSet[Any] = weakref.WeakSet()  # every instance; before 0.19, weights do not refer to theirs


def _remember_fsdp(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Record a Megatron-FSDP instance when the model that it shards becomes its submodule; PyTorch calls this hook."""
    if any(kind.__name__ == "MegatronFSDP" for kind in type(parent).__mro__):
        _fsdps.add(parent)


register_module_module_registration_hook(_remember_fsdp)


def keep_what_fsdp_adds_up(weights: Sequence[Tensor]) -> None:
    """Clear `overwrite_main_grad` of weights for which Megatron-FSDP sums micro-batches in `main_grad`.

    Megatron-FSDP sets the flag on all weights whenever it gathers them: before every forward, also of recomputation,
    and for some modules before their backward. Where it does not shard gradients (the strategy "optim", or no other
    rank to shard them with), `main_grad` holds earlier micro-batches, which an overwrite would lose.

    Raises:
        RuntimeError: as `refuse_wrong_gradients`.
    """
    for weight in weights:
        if weight.requires_grad:
            refuse_wrong_gradients(weight)
            if not weight._gbuf.is_data_distributed:  # type: ignore[attr-defined]
                weight.overwrite_main_grad = False  # type: ignore[attr-defined]


def refuse_wrong_gradients(weight: Tensor) -> None:
    """Refuse a weight for which Megatron-FSDP computes wrong gradients, whether fused or by plain autograd.

    Raises:
        RuntimeError: Megatron-FSDP has never gathered the weight, would add this rank's gradient to the reduced one, or
            would scale the sum of earlier micro-batches in `main_grad` again with every micro-batch.
    """
    buffer: Any = weight._gbuf  # type: ignore[attr-defined]
    strategy = buffer.ddp_config.data_parallel_sharding_strategy
    if strategy == "no_shard":
        return
    if not hasattr(weight, "overwrite_main_grad"):
        raise RuntimeError(
            "fsdp_unit_modules: expected modules that run their hooks, so that Megatron-FSDP gathers their weights; "
            "got experts with weights that were never gathered (before megatron-core 0.19, Megatron-FSDP does not run "
            "the hooks of the module that it wraps: wrap another module around it)"
        )
    if buffer.is_data_distributed:
        return
    for fsdp in _fsdps:
        buffers = getattr(fsdp, "param_and_grad_buffer", None)  # missing if its constructor failed
        if buffers is None or weight not in buffers.param_to_param_group:
            continue
        if not hasattr(buffers, "mp_policy"):
            raise RuntimeError(
                "data_parallel_sharding_strategy: expected megatron-core 0.17 or newer, no_shard, or optim_grads or "
                f"optim_grads_params with an expert data parallel size above 1; got {strategy} with a size of "
                f"{buffer.data_parallel_group.size()}, where Megatron-FSDP of 0.16 adds a rank's own gradient to the "
                "reduced one"
            )
        if strategy == "optim":
            continue
        if buffers.mp_policy.grad_comm_dtype not in (None, buffer.dtype):
            raise RuntimeError(
                f"megatron_fsdp_grad_comm_dtype: expected None or {buffer.dtype}, the dtype of main_grad, with "
                f"{strategy} where experts have an expert data parallel size of 1; got "
                f"{buffers.mp_policy.grad_comm_dtype}, with which Megatron-FSDP adds a rank's own gradient to the "
                "reduced one"
            )
        if fsdp.microbatch_count > 0 and buffer.gradient_scaling_factor not in (None, 1):
            raise RuntimeError(
                "data_parallel_sharding_strategy: expected no_shard or optim, one micro-batch, or "
                f"calculate_per_token_loss, where experts have an expert data parallel size of 1; got {strategy}, "
                "under which Megatron-FSDP scales the sum of earlier micro-batches in main_grad again with every one"
            )
