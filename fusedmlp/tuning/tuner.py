"""The search for faster tiles.

The tables in `kernels/tiles/configs.py` need no tuning. For one GPU and shape there may be something better: from the
table's tile, the tuner changes one number at a time, keeps what is faster, and stops when nothing is. A kernel that
accumulates runs many times then, so everything happens on scratch tensors. A tile that does not compile, does not fit,
or gives other results than the table's is not taken. Where the table also has a kernel with a task for each warp, that
is tried next, and found if it is faster than what was tuned so far.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.kernels.tiles import configs, tuned
from fusedmlp.kernels.tiles.configs import Key, Tile
from fusedmlp.operators import ops

_CHOICES: dict[str, tuple[int, ...]] = {
    "BLOCK_M": (16, 32, 64, 128, 256),
    "BLOCK_N": (32, 64, 128, 256),
    "BLOCK_K": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "SUBTILES": (1, 2, 4),
    "GROUP_M": (1, 4, 8, 16),
}
# Of a kernel with a task for each warp, whose tile has one shape.
_TASK_CHOICES: dict[str, tuple[int, ...]] = {
    "num_stages": (2, 3, 4, 5),
    "SUBTILES": (1, 2, 4, 8),
    "GROUP_M": (1, 4, 8, 16),
}
_WARPS = {"num_warps": (4, 8)}  # of its one consumer; where two multiply, each has four
# A change must save that share of the time, or it is noise.
_WORTH = 0.01


@dataclass(frozen=True)
class Problem:
    """The layer to tune for: even loads, packed weights, swiglu."""

    experts: int
    hidden: int
    ffn: int
    rows: int  # routed rows: tokens x top-k
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Trial:
    """One tile tried; `ms` is None if it failed, and `note` says how."""

    key: Key
    tile: Tile
    ms: float | None
    note: str = ""


@dataclass(frozen=True)
class Found:
    """The best tile of one kernel."""

    key: Key
    shipped: Tile
    shipped_ms: float
    tile: Tile
    ms: float


Timer = Callable[[Callable[[], object]], float]  # milliseconds that a call takes


@dataclass(frozen=True)
class _Scratch:
    """A call that runs one kernel on tensors of its own, and what sets those back to where they were."""

    kernel: str
    run: Callable[[], list[Tensor]]
    reset: Callable[[], object] = lambda: None

    def results(self) -> list[Tensor]:
        self.reset()
        return [t.clone() for t in self.run()]


def tune(problem: Problem, timer: Timer | None = None) -> Iterator[Trial | Found]:
    """Tunes every kernel: each trial as it is made, and each kernel's result, which later kernels' runs use."""
    table = configs.TABLES[configs.architecture(problem.device)]
    for scratch in _scratch_calls(problem):
        key = _key(scratch.kernel, problem)
        with _switched(False):
            tuned.use({key: table[key[:3]][key.shape]})
            expected = scratch.results()
            found = yield from _descend(key, scratch, problem.device, timer or _gpu_timer, expected, _CHOICES)
        assert found is not None  # the shipped tile gives what it is compared with
        tuned.use({found.key: found.tile})
        yield found
        own = key._replace(path="specialised")
        if key.path == "tma" and key.shape in table.get(own[:3], {}) and not configs.gluon_missing():
            with _switched(True):
                choices = _TASK_CHOICES if configs.consumers(problem.device) == 2 else _TASK_CHOICES | _WARPS
                faster = yield from _descend(own, scratch, problem.device, timer or _gpu_timer, expected, choices)
            if faster is not None and faster.ms < (1 - _WORTH) * found.ms:
                tuned.use({own: faster.tile})
                yield faster
            else:
                tuned.forget(own)


@contextmanager
def _switched(specialised: bool) -> Iterator[None]:
    """Whether kernels with a task for each warp are used, whatever the switch says."""
    before, configs.SPECIALISED = configs.SPECIALISED, specialised
    try:
        yield
    finally:
        configs.SPECIALISED = before


def _descend(
    key: Key,
    scratch: _Scratch,
    device: torch.device,
    timer: Timer,
    expected: list[Tensor],
    choices: dict[str, tuple[int, ...]],
) -> Generator[Trial, None, Found | None]:
    """From the table's tile to the fastest; None if that one fails or gives other results."""
    shipped = configs.TABLES[configs.architecture(device)][key.kernel, key.path, key.bits][key.shape]
    tuned.use({key: shipped})
    best = shipped
    try:
        if not _agree(scratch.results(), expected):
            yield Trial(key, shipped, None, "other results than the kernel without tasks for warps")
            return None
    except Exception as error:  # whatever the compiler and the launcher raise
        yield Trial(key, shipped, None, type(error).__name__)
        return None
    best_ms = shipped_ms = timer(scratch.run)
    tried = {shipped}
    while candidate := next((tile for tile in _neighbours(best, choices) if tile not in tried), None):
        tried.add(candidate)
        tuned.use({key: candidate})
        try:
            results = scratch.results()
            ms = timer(scratch.run)
        except Exception as error:  # whatever the compiler and the launcher raise
            yield Trial(key, candidate, None, type(error).__name__)
            continue
        if not _agree(results, expected):
            yield Trial(key, candidate, None, "other results than the shipped tile's")
            continue
        yield Trial(key, candidate, ms)
        if ms < (1 - _WORTH) * best_ms:
            best, best_ms = candidate, ms
    return Found(key, shipped, shipped_ms, best, best_ms)


def _neighbours(tile: Tile, numbers: dict[str, tuple[int, ...]]) -> Iterator[Tile]:
    """Tiles that differ in one of the numbers, by one step."""
    for name, choices in numbers.items():
        value = getattr(tile, name)
        yield from (
            tile._replace(**{name: c}) for c in choices if c < value and not any(c < d < value for d in choices)
        )
        yield from (
            tile._replace(**{name: c}) for c in choices if c > value and not any(value < d < c for d in choices)
        )


def _agree(results: list[Tensor], expected: list[Tensor]) -> bool:
    """Equal but for rounding in another order: within 1% of the largest value."""
    return all(
        bool((a.double() - b.double()).abs().max() <= 0.01 * b.double().abs().max())
        for a, b in zip(results, expected, strict=True)
    )


def _key(kernel: str, problem: Problem) -> Key:
    """What the problem's tensors, which are contiguous, will be launched by."""
    itemsize, rows_per_expert = problem.dtype.itemsize, problem.rows / problem.experts
    tma_fits, vectors_fit = (
        all(size % multiple == 0 for size in (problem.hidden, problem.ffn)) for multiple in (16 // itemsize, 16)
    )
    with _switched(False):
        path, _ = configs.choose(kernel, problem.dtype, problem.device, tma_fits, lambda: vectors_fit, rows_per_expert)
    return Key(kernel, path, 8 * itemsize, configs.shape_class(rows_per_expert))


def _scratch_calls(problem: Problem) -> Iterator[_Scratch]:
    """A call for every kernel. That of fc1_act also runs gemm, which is tuned by then."""
    E, H, F, R = problem.experts, problem.hidden, problem.ffn, problem.rows

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=problem.dtype, device=problem.device).div_(shape[-1] ** 0.5)

    x, dy, a, h = random(R, H), random(R, H), random(R, F), random(R, 2 * F)
    fc1, fc2, probs = random(E, 2 * F, H), random(E, H, F), torch.rand(R, device=problem.device)
    counts = torch.tensor([R // E + (e < R % E) for e in range(E)], device=problem.device)
    offsets = ops.expert_offsets(counts, R, "triton")
    dw = torch.zeros(E, H, F, device=problem.device)
    act = Activation("swiglu").encoded

    def wgrad() -> list[Tensor]:
        ops.grouped_wgrad_([dw], [], [dy], [a], [offsets], [], [], True, "triton")
        return [dw]

    def dgrad_act() -> list[Tensor]:
        weights: list[list[Tensor]] = [[fc1], [fc2], []]
        flags = (False, False, False, True)  # add to neither weight gradient, no dx; keep dh and act_probs
        return list(
            ops.grouped_mlp_backward_(
                [], [], [], [], dy, x, h, *weights, offsets, None, None, probs, act, *flags, "triton"
            )
        )[1:]

    yield _Scratch("gemm", lambda: [ops.grouped_gemm(a, [fc2], [], offsets, "triton")])
    yield _Scratch(
        "fc1_act", lambda: list(ops.grouped_mlp(x, [fc1], [fc2], [], [], offsets, None, probs, act, "triton"))
    )
    yield _Scratch("dgrad_act", dgrad_act)
    yield _Scratch("wgrad", wgrad, dw.zero_)


def _gpu_timer(run: Callable[[], object]) -> float:
    ms: float = triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median")
    return ms
