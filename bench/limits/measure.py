"""Times on a GPU: its ceilings, every pass of a step, and the step, by CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusedmlp
from bench.limits import roofline
from bench.limits.gpus import limit_ms
from bench.limits.scope import Scope
from bench.limits.shapes import Shape
from fusedmlp.kernels.launching.cost import product_flops

STEP = (*roofline.FORWARD, *roofline.BACKWARD)  # kernels of a step in the order of their launches
_WAIT = 8_000_000  # cycles: about 4 ms


class Ceilings(NamedTuple):
    """Measured rates."""

    flops: float  # FLOP/s of a dense bf16 product
    bandwidth: float  # bytes/s of a copy, read and written


class Layer:
    """A gated layer with fp32 main_grad, and the rows that it is run on."""

    def __init__(self, shape: Shape, rows: list[int], device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        E, H, F, R = shape.E, shape.H, shape.F, sum(rows)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.x = torch.empty(R, H, **options).normal_().requires_grad_()
        self.dy = torch.empty(R, H, **options).normal_()
        self.probs = torch.rand(R, device=device, requires_grad=True)
        self.fc1 = nn.Parameter(torch.empty(E, 2 * F, H, **options).normal_(std=H**-0.5))
        self.fc2 = nn.Parameter(torch.empty(E, H, F, **options).normal_(std=F**-0.5))
        self.counts = torch.tensor(rows, device=device)
        self.weights = (self.fc1, self.fc2)
        for weight in self.weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def forward(self, overwrite: bool = False) -> Tensor:
        """One forward; `overwrite` is the first micro-batch of a step."""
        self.overwrite(overwrite)
        return self.run()

    def overwrite(self, does: bool) -> None:
        """Say whether a backward overwrites main_grad."""
        for weight in self.weights:
            weight.overwrite_main_grad = does  # type: ignore[attr-defined]

    def run(self) -> Tensor:
        """The layer itself."""
        return fusedmlp.grouped_mlp(self.x, self.fc1, self.fc2, self.counts, probs=self.probs)

    def step(self, overwrite: bool = False) -> None:
        """Forward and backward, which adds into main_grad, or overwrites it."""
        self.reset()
        self.forward(overwrite).backward(self.dy)

    @contextmanager
    def without_main_grad(self) -> Iterator[None]:
        """Inside, weights have no main_grad: a step stores its gradients in `.grad`, in bfloat16."""
        buffers = [vars(weight).pop("main_grad") for weight in self.weights]
        try:
            yield
        finally:
            for weight, buffer in zip(self.weights, buffers, strict=True):
                weight.main_grad = buffer  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Drop the gradients of the last step; main_grad stays."""
        for tensor in (self.x, self.probs, *self.weights):
            tensor.grad = None


def time_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """Median ms of one run on the device; before each, the L2 cache is filled with other data.

    The GPU waits before each, so that launches queue up and the host's time does not count.
    """
    run()
    flush = torch.empty(512 * 2**20, dtype=torch.int8, device="cuda")
    times: list[float] = []
    for _ in range(repetitions):
        flush.zero_()
        torch.cuda._sleep(_WAIT)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceilings() -> Ceilings:
    """Measure this GPU now: a product of random bf16 matrices, and a copy of 4 GiB."""
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = time_ms(lambda: a @ b)
    source = torch.empty(2**32, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source))
    return Ceilings(product_flops(n, n, n) / (product / 1e3), 2 * source.numel() / (copy / 1e3))


@contextmanager
def kernel_times() -> Iterator[list[tuple[str, Callable[[], float]]]]:
    """Collects `(name, function that returns its ms)` of every Triton kernel launched inside, in order."""
    from triton import knobs  # there is no Triton without Linux

    found: list[tuple[str, Callable[[], float]]] = []
    started: list[torch.cuda.Event] = []

    def enter(_metadata: Any) -> None:
        started.append(torch.cuda.Event(enable_timing=True))
        started[-1].record()

    def leave(metadata: Any) -> None:
        start, end = started.pop(), torch.cuda.Event(enable_timing=True)
        end.record()
        found.append((metadata.get()["name"], lambda: start.elapsed_time(end)))

    hooks = ((knobs.runtime.launch_enter_hook, enter), (knobs.runtime.launch_exit_hook, leave))
    for chain, hook in hooks:
        chain.add(hook)
    try:
        yield found
    finally:
        for chain, hook in hooks:
            chain.remove(hook)


def kernel_medians(run: Callable[[], object], repetitions: int = 10) -> list[tuple[str, float]]:
    """Name and median ms of every Triton kernel of a run, in the order of their launches.

    The GPU first waits, so that launches queue up and no gap is timed.
    """
    run()
    found: list[list[tuple[str, float]]] = []
    for _ in range(repetitions):
        torch.cuda._sleep(_WAIT)
        with kernel_times() as launches:
            run()
        torch.cuda.synchronize()
        found.append([(name, ms()) for name, ms in launches])
    return [(same[0][0], statistics.median(ms for _, ms in same)) for same in zip(*found, strict=True)]


def pass_times(step: Callable[[], object], repetitions: int = 10) -> dict[str, float]:
    """Median ms of every pass of a step."""
    times = [ms for name, ms in kernel_medians(step, repetitions) if name.removeprefix("_").startswith("grouped_")]
    return dict(zip(STEP, times, strict=True))


def sustained(
    run: Callable[[], object], seconds: float, joules: Callable[[], float | None]
) -> tuple[float, float | None]:
    """Mean ms and joules of a run among many back to back, where the power limit counts.

    `joules` returns the energy that the GPU has used so far, or None.
    """

    def several(number: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(number):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / number

    several(1)
    number = max(5, int(1e3 * seconds / several(1)))
    before = joules()
    ms, after = several(number), joules()
    return ms, None if before is None or after is None else (after - before) / number


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that a run allocates above what was allocated before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def host_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """Time of the host alone, in the fastest of three rounds, while the GPU waits."""
    run()
    rounds = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(75 * _WAIT)
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        rounds.append(1e3 * (time.perf_counter() - start) / repetitions)
    torch.cuda.synchronize()
    return min(rounds)


def beside_limits(rows: Iterable[dict[str, Any]], scope: Scope) -> Iterator[dict[str, Any]]:
    """Rows of `roofline.rows` with `ms` and `of_limit`, the share of the limit by ceilings measured in this run.

    Rows of passes that `moe_experts` alone has are not measured, and stay as they are.
    """
    ceiling = ceilings()
    shapes = {shape.name: shape for shape in scope.shapes}
    for (shape, load), group in groupby(rows, lambda row: (row["shape"], row["load"])):
        layer = Layer(shapes[shape], scope.loads[load](shapes[shape]), "cuda")
        times = pass_times(layer.step)
        overwriting = pass_times(partial(layer.step, overwrite=True))
        times |= {f"{name}, overwrite": overwriting[name] for name in STEP if name.startswith("wgrad")}
        del layer
        torch.cuda.empty_cache()
        for row in group:
            if row["pass"] in times:
                limit = limit_ms(row["flops"], row["bytes"], *ceiling)
                row = row | {"ms": times[row["pass"]], "of_limit": limit / times[row["pass"]]}
            yield row
