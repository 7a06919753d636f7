"""Checks that read results on the host, for FUSEDMLP_DEBUG=1: they wait for the device, and take time.

`install` puts wrappers around functions, so that a call costs nothing more where the switch is off. Calls inside a
graph of `torch.compile`, or while a CUDA graph is captured, are not checked.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fusedmlp import environment, routing_arguments
from fusedmlp.autograd import layers
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPBackwardArguments

log = logging.getLogger("fusedmlp")
dropped = {"ids": 0, "of": 0}  # of all calls of moe_experts so far: ids outside [0, E), and all ids

_Tensors = Tensor | Sequence[Tensor] | None


def install_if_set() -> None:
    """Install the checks if the switch is set; called by `import fusedmlp`, so a wrong value warns."""
    try:
        wanted = environment.debug()
    except ValueError as error:
        warnings.warn(str(error), stacklevel=3)
        wanted = False
    if wanted:
        install()


def install() -> None:
    """Put the checks around the functions that layers call."""
    routing_arguments.counts = _checked_counts(routing_arguments.counts)
    ops.order_rows = _counted_ids(ops.order_rows)
    ops.grouped_mlp_backward_ = _watched_mlp(ops.grouped_mlp_backward_)
    layers.linear_backward = _watched_linear(layers.linear_backward)
    WgradQueue._add = _watched_run(WgradQueue._add)  # type: ignore[method-assign]


def _readable(*tensors: Tensor) -> bool:
    if torch.compiler.is_compiling() or any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _checked_counts(counts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(counts)
    def checked(tokens_per_expert: object, num_experts: int, x: Any) -> Tensor:
        found = counts(tokens_per_expert, num_experts, x)
        if _readable(found):
            sizes, rows = found.tolist(), x.tensor.shape[0]
            if min(sizes) < 0:
                raise ValueError(f"tokens_per_expert: expected no negative count; got {sizes}")
            if sum(sizes) > rows:
                raise ValueError(f"tokens_per_expert: expected a sum of at most {rows} (rows of x); got {sum(sizes)}")
            if sum(sizes) < rows:
                log.warning("tokens_per_expert: %d of %d rows belong to no expert: padding", rows - sum(sizes), rows)
        return found

    return checked


def _counted_ids(order_rows: Any) -> Any:
    @wraps(order_rows)
    def counted(ids: Tensor, probs: Tensor, num_experts: int, impl: str) -> Any:
        if _readable(ids):
            outside = int(((ids < 0) | (ids >= num_experts)).sum())
            dropped["ids"] += outside
            dropped["of"] += ids.numel()
            if outside:
                log.warning(
                    "top_k_index: expected ids in [0, %d); got %d of %d outside, which are dropped (so far %d of %d)",
                    *(num_experts, outside, ids.numel(), dropped["ids"], dropped["of"]),
                )
        return order_rows(ids, probs, num_experts, impl)

    return counted


def _watched_mlp(backward: Any) -> Any:
    @wraps(backward)
    def watched(*args: Any) -> Any:
        of = MLPBackwardArguments(*args)
        if not _readable(of.dy):
            return backward(*args)
        rows = _number_of_rows(of.offsets, of.fc1)
        given: dict[str, Any] = {"dy": _used(of.dy, rows, of.row_ids)}
        given |= {"x": _used(of.x, rows, of.row_ids)} if of.x_scales is None else {}
        given |= {"h": of.h[:rows], "probs": of.probs}
        given |= {"fc1_weight": of.fc1, "fc2_weight": of.fc2, "fc2_bias": of.bias2}
        added: dict[str, Any] = {"fc1": of.dw1 if of.accumulate1 else None, "fc2": of.dw2 if of.accumulate2 else None}
        cause = _cause(given | _accumulated(**added))
        dx, dprobs, dh, act_probs = results = backward(*args)
        _report("dgrad of fc2, through the activation", [_used(dh, rows), _used(act_probs, rows)], cause)
        _report("the gradient of the probabilities", [dprobs], cause)
        _report("dgrad of fc1", [dx], cause)
        _report("wgrad of fc2", [*of.dw2, *of.db2], cause)
        _report("wgrad of fc1", [*of.dw1, *of.db1], cause)
        return results

    return watched


def _watched_linear(backward: Any) -> Any:
    @wraps(backward)
    def watched(dy: Tensor, x: Tensor, w: Any, offsets: Tensor, dw: list[Tensor], db: list[Tensor], *rest: Any) -> Any:
        if not _readable(dy):
            return backward(dy, x, w, offsets, dw, db, *rest)
        rows = _number_of_rows(offsets, w or dw) if w or dw else 0
        given = {"dy": dy[:rows], "x": x[:rows], "weight": w}
        cause = _cause(given | _accumulated(weight=dw if rest[1] else None))
        dx = backward(dy, x, w, offsets, dw, db, *rest)
        _report("dgrad of grouped_linear", [dx], cause)
        _report("wgrad of grouped_linear", [*dw, *db], cause)
        return dx

    return watched


def _watched_run(add: Any) -> Any:
    """Watch the gradients that a `WgradQueue` computes: `add` is its method for one batch."""

    @wraps(add)
    def watched(queue: Any, batch: Any) -> Any:
        route = batch[0].route
        if not _readable(batch[0].operands.dy):
            return add(queue, batch)
        name, params, destination = route.name, [param for _, param, _ in route.leaves], route.destination
        each = [(b.operands, _number_of_rows(b.operands.offsets, route.params)) for b in batch]
        given: dict[str, Any] = {
            "dy": [_used(operands.dy, rows, operands.dy_row_ids) for operands, rows in each],
            "x": [_used(operands.x, rows, operands.x_row_ids) for operands, rows in each],
            f"the earlier gradient of {name}": destination.tensors(params),
        }
        cause = _cause(given)
        left = add(queue, batch)
        _report(f"delayed wgrad of {name}", destination.tensors(params), cause)
        return left

    return watched


def _number_of_rows(offsets: Tensor, weights: Sequence[Tensor]) -> int:
    """The end of the last expert's rows."""
    packed = weights[0].dim() == 3
    return int(offsets[weights[0].shape[0] if packed else len(weights)])


def _used(t: Tensor | None, rows: int, row_ids: Tensor | None = None) -> Tensor | None:
    """The rows that are not padding."""
    if t is None or t.numel() == 0:
        return None
    return t[:rows] if row_ids is None else t.index_select(0, row_ids[:rows].int())


def _accumulated(**targets: list[Tensor] | None) -> dict[str, _Tensors]:
    return {f"the earlier gradient of {name}": tensors for name, tensors in targets.items() if tensors}


def _bad(tensors: _Tensors) -> tuple[int, int]:
    """Numbers of values that are not finite, and of all."""
    group = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors or () if t is not None]
    wide = [t.float() if t.element_size() == 1 else t for t in group]
    return sum(int((~t.isfinite()).sum()) for t in wide), sum(t.numel() for t in wide)


def _cause(given: dict[str, Any]) -> str:
    names = [name for name, tensors in given.items() if _bad(tensors)[0]]
    return f"not finite before it: {', '.join(names)}" if names else "all that it reads is finite"


def _report(what: str, gradients: Sequence[Tensor | None], cause: str) -> None:
    bad, size = _bad([g for g in gradients if g is not None])
    if bad:
        log.warning("%s: expected finite gradients; got %d of %d values that are not (%s)", what, bad, size, cause)
