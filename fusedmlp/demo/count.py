"""Count copies, adds and peak memory of expert weight gradients in one training step, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch._C._profiler import _ExtraFields_Allocation, _ExtraFields_TorchOp, _ProfilerEvent, _TensorMetadata
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from fusedmlp.demo.train import Trainer

_ALLOCATION_GRANULE = 512  # bytes; the CUDA allocator rounds sizes up to it


@dataclass(frozen=True)
class StepCount:
    """Counts of one optimizer step, for expert weights only.

    Attributes:
        copies: `copy_` that AccumulateGrad ran, itself or in a `clone`.
        adds: `add_` and `add` that AccumulateGrad ran.
        peak_bytes: most bytes that held weight gradients at once; see `count_step`. None with a recipe, whose copies of
            weights cannot be told from gradients.
    """

    copies: int
    adds: int
    peak_bytes: int | None


def count_step(trainer: Trainer, *, has_peak: bool = True) -> StepCount:
    """Run one more step of `trainer` under the profiler and count; without `peak_bytes` unless it `has_peak`.

    Copies and adds are operators inside AccumulateGrad with a first input of an expert weight's shape, which no other
    parameter has.

    `peak_bytes` is the `main_grad` buffer, if there is one, plus the largest sum of live allocations that could hold
    gradients of expert weights. Such an allocation has an expert weight's size in bytes and is made by an operator with
    an input of an expert weight's shape, such as `empty_like` or `add`. Three others of that size are left out:
    temporaries of `optimizer.step()`; activations, as no input of their operators has the shape; and results of
    `_grouped_mm`, which are activations although a weight is an input.
    """
    weights = trainer.model.expert_weights()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof:
        trainer.step()
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    shapes = {tuple(weight.shape) for weight in weights}
    ops = [event.name for event in prof.events() or [] if _in_accumulate_grad(event) and _first_shape(event) in shapes]
    peak = None
    if has_peak:
        peak = 0 if trainer.buffer is None else trainer.buffer.flat.nbytes
        peak += _peak(prof.profiler.kineto_results.experimental_event_tree(), weights)
    return StepCount(
        copies=ops.count("aten::copy_"), adds=ops.count("aten::add_") + ops.count("aten::add"), peak_bytes=peak
    )


def _in_accumulate_grad(event: FunctionEvent) -> bool:
    parent = event.cpu_parent
    while parent is not None and parent.name != "torch::autograd::AccumulateGrad":
        parent = parent.cpu_parent
    return parent is not None


def _first_shape(event: FunctionEvent) -> tuple[int, ...] | None:
    shapes = event.input_shapes
    return tuple(shapes[0]) if shapes and isinstance(shapes[0], list) else None


def _peak(roots: list[_ProfilerEvent], weights: list[nn.Parameter]) -> int:
    shapes = {tuple(weight.shape) for weight in weights}
    sizes = {_rounded(weight.nbytes) for weight in weights}
    events = sorted(
        (item for root in roots for item in _allocations(root, shapes)), key=lambda item: item[0].start_time_ns
    )
    live: dict[int, int] = {}
    total = peak = 0
    for event, of_weight_shape in events:
        fields = event.extra_fields
        assert isinstance(fields, _ExtraFields_Allocation)
        if fields.alloc_size < 0:
            total -= live.pop(fields.ptr, 0)
        elif of_weight_shape and _rounded(fields.alloc_size) in sizes:
            live[fields.ptr] = fields.alloc_size
            total += fields.alloc_size
            peak = max(peak, total)
    return peak


def _allocations(
    event: _ProfilerEvent, shapes: set[tuple[int, ...]], of_weight_shape: bool = False
) -> Iterator[tuple[_ProfilerEvent, bool]]:
    """Yield every allocation and release under `event`, and whether an operator with a weight-shaped input made it."""
    fields = event.extra_fields
    if isinstance(fields, _ExtraFields_Allocation):
        yield event, of_weight_shape
        return
    if event.name.startswith("Optimizer.step#"):
        shapes = set()
    elif isinstance(fields, _ExtraFields_TorchOp) and event.name.startswith("aten::"):
        inputs = [tuple(item.sizes) for item in fields.inputs if isinstance(item, _TensorMetadata)]
        of_weight_shape = of_weight_shape or not shapes.isdisjoint(inputs)
        if event.name == "aten::_grouped_mm":
            of_weight_shape, shapes = False, set()
    for child in event.children:
        yield from _allocations(child, shapes, of_weight_shape)


def _rounded(size: int) -> int:
    return -(-size // _ALLOCATION_GRANULE) * _ALLOCATION_GRANULE
