"""Checks that read results on the host, for FUSEDMLP_DEBUG=1: they wait for the device, and take time.

Layers and queues call them where `enabled` is true. Inside a graph of `torch.compile`, or while a CUDA graph is
captured, they check nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fusedmlp import environment
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPBackwardArguments

log = logging.getLogger("fusedmlp")
dropped = {"ids": 0, "of": 0}  # of all calls of moe_experts so far: ids outside [0, E), and all ids
enabled = False
try:
    enabled = environment.debug()
except ValueError as error:
    warnings.warn(str(error), stacklevel=2)


class Rows(NamedTuple):
    """Rows of a tensor that belong to experts: padding behind them is not checked."""

    tensor: Tensor | None
    offsets: Tensor
    weights: Sequence[Tensor]  # of these experts: one packed, or one for each
    row_ids: Tensor | None = None


def check_counts(counts: Tensor, num_rows: int) -> None:
    """Raise ValueError for wrong counts `[E]`, as an operator does on the CPU; log how many rows are padding."""
    if not _readable(counts):
        return
    sizes = counts.tolist()
    total = sum(sizes)
    if min(sizes) < 0:
        raise ValueError(f"tokens_per_expert: expected no negative count; got {sizes}")
    if total > num_rows:
        raise ValueError(f"tokens_per_expert: expected a sum of at most {num_rows} (rows of x); got {total}")
    if total < num_rows:
        log.warning("tokens_per_expert: %d of %d rows belong to no expert: padding", num_rows - total, num_rows)


def count_ids(ids: Tensor, num_experts: int) -> None:
    """Count and log the ids outside `[0, num_experts)`."""
    if not _readable(ids):
        return
    outside = int(((ids < 0) | (ids >= num_experts)).sum())
    dropped["ids"] += outside
    dropped["of"] += ids.numel()
    if outside:
        log.warning(
            "top_k_index: expected ids in [0, %d); got %d of %d outside, which are dropped (so far %d of %d)",
            *(num_experts, outside, ids.numel(), dropped["ids"], dropped["of"]),
        )


def watch(dy: Tensor, read: dict[str, Any]) -> Callable[[str, Any], None]:
    """Look for values that are not finite in all that GEMMs will read, by name: tensors, `Rows`, or lists of them.

    Returns a function to call after the GEMMs, with the name of a pass and its gradients: it logs those not finite.
    """
    if not _readable(dy):
        return lambda name, gradients: None
    names = ", ".join(name for name, value in read.items() if _not_finite(value)[0])
    cause = f"not finite before it: {names}" if names else "all that it reads is finite"

    def report(name: str, gradients: Any) -> None:
        bad, size = _not_finite(gradients)
        if bad:
            message = "%s: expected finite gradients; got %d of %d values that are not (%s)"
            log.warning(message, name, bad, size, cause)

    return report


def mlp_backward(*args: Any) -> Any:
    """Run `ops.grouped_mlp_backward_`, watched."""
    given = MLPBackwardArguments(*args)

    def rows(tensor: Tensor | None, row_ids: Tensor | None = None) -> Rows:
        return Rows(tensor, given.offsets, given.fc1, row_ids)

    report = watch(
        given.dy,
        {
            "dy": rows(given.dy, given.row_ids),
            "x": rows(given.x, given.row_ids) if given.x_scales is None else None,
            "h": rows(given.h),
            "probs": given.probs,
            "fc1_weight": given.fc1,
            "fc2_weight": given.fc2,
            "fc2_bias": given.bias2,
            "fc1_lora": given.lora1,
            "fc2_lora": given.lora2,
            "the earlier gradient of fc1": given.dw1 if given.accumulate1 else None,
            "the earlier gradient of fc2": given.dw2 if given.accumulate2 else None,
        },
    )
    dx, dprobs, dh, act_probs = results = ops.grouped_mlp_backward_(*args)
    report("dgrad of fc2, through the activation", [rows(dh), rows(act_probs)])
    report("the gradient of the probabilities", dprobs)
    report("dgrad of fc1", dx)
    report("wgrad of fc2", [*given.dw2, *given.db2, *given.dlora2])
    report("wgrad of fc1", [*given.dw1, *given.db1, *given.dlora1])
    return results


def _readable(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _not_finite(value: Any) -> tuple[int, int]:
    """Numbers of values that are not finite, and of all."""
    if isinstance(value, Rows):
        value = _used(value)
    if value is None:
        return 0, 0
    if isinstance(value, Tensor):
        wide = value.float() if value.element_size() == 1 else value
        return int((~wide.isfinite()).sum()), value.numel()
    counts = [_not_finite(part) for part in value]
    return sum(bad for bad, _ in counts), sum(size for _, size in counts)


def _used(rows: Rows) -> Tensor | None:
    if rows.tensor is None or rows.tensor.numel() == 0:
        return None
    num_experts = rows.weights[0].shape[0] if rows.weights[0].dim() == 3 else len(rows.weights)
    end = int(rows.offsets[num_experts])
    return rows.tensor[:end] if rows.row_ids is None else rows.tensor.index_select(0, rows.row_ids[:end].int())
