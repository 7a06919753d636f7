"""Trains a model for some steps, and measures its losses, its time, the experts' share of it and its memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.gpu.stacks.widths import VOCABULARY, Widths

STEPS, UNTIMED, MICRO_BATCHES = 20, 5, 2
REHEARSED, HOOKED = 4, 3  # steps on the CPU; steps after all others, in which experts are timed
# Largest differences in bfloat16 between gradients of the same weights: of norms, relative; of their correlation with
# the weights, in units of that of random numbers.
OF_NORM, OF_CORRELATION = 0.05, 0.2


class Training(NamedTuple):
    """A model that a stack trains."""

    # Takes micro-batches, `[batch, length + 1]` token ids, and True to update weights afterwards; returns their loss.
    step: Callable[[Sequence[Tensor], bool], float]
    experts: Sequence[nn.Module]  # of all layers, as the stack calls them


class Gradient(NamedTuple):
    """Two numbers of the gradient of one layer's experts, which do not depend on how a stack stores weights."""

    norm: float
    correlation: float  # with the weights, times the square root of their number: 1 is usual for random numbers


class Measured(NamedTuple):
    """Results of one training."""

    gradients: list[Gradient]  # of each layer, at the first weights
    losses: list[float]
    ms: float  # median of a step
    experts_ms: float | None  # forward and backward of all experts in a step; None in a compiled model
    mib: int | None  # peak of allocated memory; None on the CPU


def run(build: Callable[[], Training], widths: Widths, device: str, compiled: bool) -> Measured:
    """Build a model, train it on the same text as every other, and free it."""
    generator = torch.Generator().manual_seed(0)
    training, losses, times = build(), list[float](), list[float]()
    text = [_text(widths, generator).to(device) for _ in range(MICRO_BATCHES)]
    training.step(text, False)
    gradients = [_gradient(experts) for experts in training.experts]
    steps, untimed = (STEPS, UNTIMED) if device == "cuda" else (REHEARSED, 1)
    for step in range(steps):
        text = [_text(widths, generator).to(device) for _ in range(MICRO_BATCHES)]
        if device == "cuda" and step == untimed:
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        losses.append(training.step(text, True))  # ends by reading the loss
        _wait(device)
        times.append(1e3 * (time.perf_counter() - now))
    mib = torch.cuda.max_memory_allocated() >> 20 if device == "cuda" else None
    experts_ms = None if compiled else _experts_ms(training, text, device)
    del training
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return Measured(gradients, losses, statistics.median(times[untimed:]), experts_ms, mib)


def differ(own: Measured, found: Measured) -> str:
    """Tell where gradients differ from those of the stack's own experts by more than rounding; "" if they agree.

    Losses of later steps are no test: Adam and routing amplify rounding, in some models by a factor of four a step.
    """
    for layer, (expected, got) in enumerate(zip(own.gradients, found.gradients, strict=True)):
        of_norm = abs(got.norm - expected.norm) / expected.norm
        if not (of_norm <= OF_NORM and abs(got.correlation - expected.correlation) <= OF_CORRELATION):
            return f"layer {layer}: expected {expected} of the experts' weights, as with the stack's own; got {got}"
    return ""


def _gradient(experts: nn.Module) -> Gradient:
    pairs = [(p, grad) for p in experts.parameters() if (grad := getattr(p, "main_grad", p.grad)) is not None]
    local = [[t.to_local() if isinstance(t, DTensor) else t for t in (p.detach(), grad)] for p, grad in pairs]
    product = sum(float((weight.float() * grad).sum(dtype=torch.float64)) for weight, grad in local)
    norms = [
        sum(float(t.float().square().sum(dtype=torch.float64)) for t in each) ** 0.5
        for each in zip(*local, strict=True)
    ]
    number = sum(weight.numel() for weight, _ in local)
    return Gradient(norms[1], product * number**0.5 / (norms[0] * norms[1] or 1.0))


def _text(widths: Widths, generator: torch.Generator) -> Tensor:
    """Text that can be learned: every token is the one before it plus a step, the same throughout a sequence."""
    start, step = torch.randint(VOCABULARY, (2, widths.batch, 1), generator=generator)
    return (start + (1 + step % 3) * torch.arange(widths.length + 1)) % VOCABULARY


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _experts_ms(training: Training, text: Sequence[Tensor], device: str) -> float:
    """Time between the beginning and the end of the experts' forward, and likewise of backward; median of steps."""
    times = []
    with _marks(training.experts, device) as marks:
        for _ in range(HOOKED):
            training.step(text, True)
            _wait(device)
            times.append(sum(_between(*pair) for pair in zip(marks[::2], marks[1::2], strict=True)))
            marks.clear()
    return statistics.median(times)


@contextmanager
def _marks(experts: Sequence[nn.Module], device: str) -> Iterator[list[Any]]:
    """Collect a mark where the experts' forward begins, ends, and where backward reaches and leaves them.

    Passes of a module do not overlap, so marks come in pairs. The experts' input is a view of what they are given,
    whose gradient is complete when that of the experts is.
    """
    marks: list[Any] = []

    def mark(*_: object) -> None:
        if device != "cuda":
            marks.append(time.perf_counter())
            return
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    def begins(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x, *others = given
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(mark)
        mark()
        return (x, *others), named

    def ends(_module: nn.Module, _given: object, y: Any) -> None:
        mark()
        first = y[0] if isinstance(y, tuple) else y
        if first.requires_grad:
            first.register_hook(mark)

    handles = []
    for module in experts:
        handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        handles.append(module.register_forward_hook(ends))
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def _between(first: Any, last: Any) -> float:
    return float(first.elapsed_time(last) if isinstance(first, torch.cuda.Event) else 1e3 * (last - first))
