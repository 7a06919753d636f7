"""Megatron-FSDP's `param.get_main_grad()`, which allocates a `main_grad` on demand; refuses what it would do wrong to
gradients in there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from fusedmlp.contract.destinations.destination import Targets
from fusedmlp.contract.destinations.main_grad import MainGrad
from fusedmlp.contract.parameter_state import Place


class MegatronFSDPMainGrad(MainGrad):
    """As `MainGrad`, for parameters that Megatron-FSDP shards."""

    title = "a parameter of Megatron-FSDP"
    may_trace = False

    def find(self, params: Sequence[Tensor]) -> list[bool]:
        """Find Megatron-FSDP's mark: asking for `main_grad` would allocate it."""
        return [hasattr(param, "__fsdp_param__") for param in params]

    def tensors(self, params: Sequence[Tensor]) -> Targets:
        """The `main_grad`s, which this call allocates. Clears `overwrite_main_grad` where they hold a sum.

        Megatron-FSDP sets that flag on all weights whenever it gathers them: before every forward, also of
        recomputation, and for some modules before their backward. Where it does not shard gradients (the strategy
        "optim", or no other rank to shard them with), `main_grad` holds earlier micro-batches.
        """
        for param in params:
            refuse_wrong_gradients(param)
            buffer = getattr(param, "_gbuf", None)
            if buffer is not None and not buffer.is_data_distributed:
                param.overwrite_main_grad = False  # type: ignore[attr-defined]
        return [param.get_main_grad() for param in params]  # type: ignore[attr-defined]

    def refuse(self, param: Tensor, place: Place) -> None:
        """Refuse nothing in forward."""


_fsdps: weakref.WeakSet[Any] = weakref.WeakSet()  # every instance; before 0.19, weights do not refer to theirs


def _remember_fsdp(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Record a Megatron-FSDP instance when the model that it shards becomes its submodule; PyTorch calls this hook."""
    if "megatron" in sys.modules and any(kind.__name__ == "MegatronFSDP" for kind in type(parent).__mro__):
        _fsdps.add(parent)


register_module_module_registration_hook(_remember_fsdp)


def refuse_wrong_gradients(*weights: Tensor) -> None:
    """Refuse weights for which Megatron-FSDP computes wrong gradients, whether fused or by plain autograd.

    Raises:
        RuntimeError: Megatron-FSDP has never gathered a weight, would add this rank's gradient to the reduced one, or
            would scale the sum of earlier micro-batches in `main_grad` again with every micro-batch.
    """
    for weight in weights:
        _refuse(weight)


def _refuse(weight: Tensor) -> None:
    buffer: Any = getattr(weight, "_gbuf", None)  # other owners may follow the protocol, which is TransformerEngine's
    strategy = "no_shard" if buffer is None else buffer.ddp_config.data_parallel_sharding_strategy
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
