"""Copies, adds and peak memory of expert weight gradients in one training step, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


class StepCount(NamedTuple):
    """Counts of one optimizer step, for expert weights only."""

    copies: int  # `copy_` that AccumulateGrad ran, itself or in a `clone`
    adds: int  # `add_` and `add` that it ran
    peak_bytes: int | None  # most bytes that held weight gradients at once


def count_step(step: Callable[[], Any], weights: Sequence[Tensor], lent_bytes: int = 0) -> StepCount:
    """Run one step under the profiler and count. No other parameter may have the shape of one of `weights`.

    Copies and adds are operators inside AccumulateGrad with a first input of a weight's shape. `peak_bytes` is
    `lent_bytes`, the size of a `MainGradBuffer`, plus the largest sum of live allocations that could hold gradients:
    those of a weight's size, by an operator with an input of a weight's shape (`empty_like`, `add`) that is neither
    `_grouped_mm`, whose results are activations, nor in `optimizer.step()`.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof:
        step()
    shapes = {tuple(w.shape) for w in weights}
    sizes = {-(-w.nbytes // 512) for w in weights}  # as the CUDA allocator rounds
    accumulated = [e.name for e in prof.events() or () if _first_shape(e) in shapes and _in_accumulate_grad(e)]
    results: Any = prof.profiler
    roots = results.kineto_results.experimental_event_tree()
    allocations = [item for root in roots for item in _allocations(root, shapes, False)]
    live: dict[int, int] = {}
    peak = 0
    for event, holds_gradients in sorted(allocations, key=lambda item: item[0].start_time_ns):
        size = event.extra_fields.alloc_size
        if size < 0:
            live.pop(event.extra_fields.ptr, None)
        elif holds_gradients and -(-size // 512) in sizes:
            live[event.extra_fields.ptr] = size
            peak = max(peak, sum(live.values()))
    adds = accumulated.count("aten::add_") + accumulated.count("aten::add")
    return StepCount(accumulated.count("aten::copy_"), adds, lent_bytes + peak)


def _in_accumulate_grad(event: Any) -> bool:
    while event is not None and event.name != "torch::autograd::AccumulateGrad":
        event = event.cpu_parent
    return event is not None


def _first_shape(event: Any) -> tuple[int, ...]:
    shapes = event.input_shapes
    return tuple(shapes[0]) if shapes and isinstance(shapes[0], list) else ()


def _allocations(event: Any, shapes: set[tuple[int, ...]], holds: bool) -> Iterator[tuple[Any, bool]]:
    """Every allocation and release under `event`, and whether an operator with a weight-shaped input made it."""
    if hasattr(event.extra_fields, "alloc_size"):
        yield event, holds
        return
    if event.name.startswith("Optimizer.step#") or event.name == "aten::_grouped_mm":
        holds, shapes = False, set()
    elif event.name.startswith("aten::"):
        inputs = [tuple(own.sizes) for own in getattr(event.extra_fields, "inputs", ()) if hasattr(own, "sizes")]
        holds = holds or not shapes.isdisjoint(inputs)
    for child in event.children:
        yield from _allocations(child, shapes, holds)
