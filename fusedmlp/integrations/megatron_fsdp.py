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
        RuntimeError: Megatron-FSDP would scale what earlier micro-batches left there again with every one.
    """
    for weight in weights:
        if not weight.requires_grad:
            continue
        buffer: Any = weight._gbuf  # type: ignore[attr-defined]
        if buffer.is_data_distributed:
            continue
        weight.overwrite_main_grad = False  # type: ignore[attr-defined]
        if buffer.gradient_scaling_factor in (None, 1):
            continue
        for fsdp in _fsdps:
            added = fsdp.microbatch_count > 0 and weight in fsdp.param_and_grad_buffer.param_to_param_group
            if added and not fsdp.is_delay_grad_reduce:
                raise RuntimeError(
                    "data_parallel_sharding_strategy: expected no_shard or optim, one micro-batch, or "
                    "calculate_per_token_loss, where experts have an expert data parallel size of 1; got "
                    f"{fsdp.ddp_config.data_parallel_sharding_strategy}, under which Megatron-FSDP scales what "
                    "earlier micro-batches left in main_grad again with every one"
                )
