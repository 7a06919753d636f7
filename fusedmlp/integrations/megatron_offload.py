"""Megatron-core's fine-grained offloading of activations, for experts that compute fc1, activation and fc2 at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from megatron.core.pipeline_parallel import fine_grained_activation_offload
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Weights = Tensor | Sequence[Tensor]
_WHOLE = "fused_group_mlp"


def modules(config: Any) -> set[str]:
    """Names in `config.offload_modules` that are about what experts save.

    Raises:
        ValueError: there are some, and Megatron-core is older than 0.19.
    """
    if not getattr(config, "fine_grained_activation_offloading", False):
        return set()
    inside = {"expert_fc1", "moe_act", _WHOLE} & set(config.offload_modules or ())
    interface = fine_grained_activation_offload.FineGrainedActivationOffloadingInterface
    if inside and not hasattr(interface, "group_offload"):
        raise ValueError(
            "config.offload_modules: expected none inside the experts with megatron-core before 0.19, which offloads "
            f"by another protocol; got {sorted(inside)}"
        )
    return inside


def offload(config: Any, compute: Callable[[Tensor], Tensor], rows: Tensor, fc1: Weights) -> Tensor:
    """Return `compute(rows)`; Megatron sends to the CPU those tensors for backward that its config names.

    These are the rows ("expert_fc1"), fc1's outputs `[R, F1]` ("moe_act"), or both ("fused_group_mlp"). Others stay,
    such as 8-bit copies of weights, which serve every micro-batch.

    Args:
        config: Megatron's.
        compute: the experts.
        rows: `[R, H]`; freed once they are on the CPU, as by `TEGroupedMLP`.
        fc1: weights of the experts.
    """
    names = modules(config)
    if not names:
        return compute(rows)
    manager = fine_grained_activation_offload.PipelineOffloadManager.get_instance()
    name = _WHOLE if len(names) > 1 else next(iter(names))
    scope = fine_grained_activation_offload.FineGrainedActivationOffloadingInterface(True, rows, name)
    whole = len(names) > 1 or _WHOLE in names
    sends_rows, sends_h = whole or "expert_fc1" in names, whole or "moe_act" in names
    h_shape = (rows.shape[0], fc1[0].shape[0])

    def pack(saved: Tensor) -> Any:
        is_rows = saved.data_ptr() == rows.data_ptr() and saved.shape == rows.shape
        is_h = saved.shape == h_shape and not is_rows
        return (manager.on_save_for_backward(saved),) if (sends_rows and is_rows) or (sends_h and is_h) else saved

    def unpack(kept: Any) -> Any:
        return manager.on_get_saved_tensor(kept[0]) if isinstance(kept, tuple) else kept

    with scope as rows:
        chunk = manager.cur_forward_chunk()  # None outside of Megatron's schedules
        with saved_tensors_hooks(pack, unpack) if chunk is not None and chunk.do_offload else nullcontext():
            y = compute(rows)
    freed: Sequence[Tensor] = [rows] if sends_rows else []
    return scope.group_offload(y, freed, config.delay_offload_until_cuda_graph)  # type: ignore[no-any-return]
