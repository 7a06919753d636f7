"""Megatron-FSDP: what it would do to gradients that a kernel adds into its buffers, prevented or refused."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

_fsdps: weakref.WeakSet[Any] = weakref.WeakSet()  # all that there are; their weights know them since 0.19 only


def _remember_fsdp(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """PyTorch's hook, called when a module gets a submodule: Megatron-FSDP gets the model that it shards."""
    if any(kind.__name__ == "MegatronFSDP" for kind in type(parent).__mro__):
        _fsdps.add(parent)


register_module_module_registration_hook(_remember_fsdp)


def keep_what_fsdp_adds_up(weights: Sequence[Tensor]) -> None:
    """Take `overwrite_main_grad` off weights in whose `main_grad` Megatron-FSDP adds micro-batches up.

    It sets it on all weights whenever it gathers them: before a forward, that of recomputation included, and for some
    modules before their backward. Where it does not shard gradients (the strategy "optim", or no other rank to shard
    them with), `main_grad` outlives a micro-batch, and overwriting would lose those before.

    Raises:
        RuntimeError: as `refuse_wrong_gradients`.
    """
    for weight in weights:
        if weight.requires_grad:
            refuse_wrong_gradients(weight)
            if not weight._gbuf.is_data_distributed:  # type: ignore[attr-defined]
                weight.overwrite_main_grad = False  # type: ignore[attr-defined]


def refuse_wrong_gradients(weight: Tensor) -> None:
    """Raise where Megatron-FSDP makes wrong gradients, plain autograd's included.

    Raises:
        RuntimeError: it has never gathered the weight, would add this rank's gradient to the reduced one, or would
            scale what earlier micro-batches left in `main_grad` again with every one.
    """
    buffer: Any = weight._gbuf  # type: ignore[attr-defined]
    strategy = buffer.ddp_config.data_parallel_sharding_strategy
    if strategy == "no_shard":
        return
    if not hasattr(weight, "overwrite_main_grad"):
        raise RuntimeError(
            "fsdp_unit_modules: expected modules whose hooks run, so that Megatron-FSDP gathers their weights; got "
            "experts whose weights it never gathered (before megatron-core 0.19 the hooks of the module that it wraps "
            "do not run: wrap another module around it)"
        )
    if buffer.is_data_distributed:
        return
    for fsdp in _fsdps:
        buffers = getattr(fsdp, "param_and_grad_buffer", None)  # one whose constructor failed has none
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
                f"megatron_fsdp_grad_comm_dtype: expected None or {buffer.dtype}, as main_grad is, with {strategy} "
                f"where experts have an expert data parallel size of 1; got {buffers.mp_policy.grad_comm_dtype}, with "
                "which Megatron-FSDP adds a rank's own gradient to the reduced one"
            )
        if fsdp.microbatch_count > 0 and buffer.gradient_scaling_factor not in (None, 1):
            raise RuntimeError(
                "data_parallel_sharding_strategy: expected no_shard or optim, one micro-batch, or "
                f"calculate_per_token_loss, where experts have an expert data parallel size of 1; got {strategy}, "
                "under which Megatron-FSDP scales what earlier micro-batches left in main_grad again with every one"
            )
