"""Search for faster tiles.

The tables in `kernels/tiles/table.py` need no tuning. For one GPU and shape there may be a faster tile: from the
table's tile, the tuner changes one number at a time, keeps a change that is faster, and stops when none is. All runs
use scratch tensors, as a kernel that accumulates would otherwise add many times. A tile that does not compile, does not
fit, or gives other results than the table's is rejected. Where the table also has a warp-specialized kernel,
the tuner searches its tiles next, and returns the best if it is faster than the best tile so far, or if such kernels
are used anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fusedmlp.activation import Activation
from fusedmlp.kernels.tiles import select
from fusedmlp.kernels.tiles.select import Settings
from fusedmlp.kernels.tiles.table import Key, Tile, regime_of_wgrad, small
from fusedmlp.kernels.warp_specialized import gluon_missing
from fusedmlp.operators import triton_impl
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments

_CHOICES: dict[str, tuple[int, ...]] = {
    "BLOCK_M": (16, 32, 64, 128, 256),
    "BLOCK_N": (32, 64, 128, 256),
    "BLOCK_K": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "SUBTILES": (1, 2, 4),
    "GROUP_M": (1, 4, 8, 16),
}
# Choices for a warp-specialized kernel: rows and columns of its tile are fixed, its ring is not.
_WARP_SPECIALIZED_CHOICES: dict[str, tuple[int, ...]] = {
    "num_stages": (2, 3, 4, 5, 6, 8, 12),
    "SUBTILES": (1, 2, 4, 8),
    "GROUP_M": (1, 4, 8, 16),
}
_DEPTHS: dict[str, dict[str, tuple[int, ...]]] = {  # added on Hopper
    "wgrad": {"BLOCK_M": (16, 32, 64), "SLOTS": (0, 2, 4)},
    "dgrad_act": {"BLOCK_K": (32, 64)},
}
_CONSUMER_WARPS = {"num_warps": (4, 8)}  # added where there is one consumer; of two, each has four
_MIN_SAVING = 0.01  # share of the time that a change must save; less is noise


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
    """One tile tried; `ms` is None if it failed, and `note` says why."""

    key: Key
    tile: Tile
    ms: float | None
    note: str = ""


@dataclass(frozen=True)
class Found:
    """The fastest tile found for one kernel, beside the shipped one."""

    key: Key
    shipped: Tile
    shipped_ms: float
    tile: Tile
    ms: float


Timer = Callable[[Callable[[], object]], float]  # milliseconds that a call takes


@dataclass(frozen=True)
class _Scratch:
    """A call that runs one kernel on scratch tensors, and one that restores what the kernel accumulates into."""

    kernel: str
    run: Callable[[Settings], list[Tensor]]
    reset: Callable[[], object] = lambda: None

    def results(self, settings: Settings) -> list[Tensor]:
        self.reset()
        return [t.clone() for t in self.run(settings)]


def tune(problem: Problem, timer: Timer | None = None) -> Iterator[Trial | Found]:
    """Tune every kernel; yield each trial and each tile found. Later trials run with the tiles found before.

    Args:
        problem: the layer.
        timer: times a call, in milliseconds; default: Triton's `do_bench` on a GPU.
    """
    target = select.target(problem.device, Settings(), problem.dtype)
    timer, tuned = timer or _gpu_timer, dict[Key, Tile]()
    for scratch in _scratch_calls(problem):
        key = _key(scratch.kernel, problem)
        shipped = target.tiles[key]
        expected = scratch.results(Settings(False, tuned | {key: shipped}))
        found = yield from _descend(_Search(key, scratch, shipped, tuned, _CHOICES), timer, expected)
        assert found is not None  # `expected` is what the shipped tile gives
        tuned[found.key] = found.tile
        yield found
        warp_specialized = _warp_specialized(scratch.kernel, problem, target)
        if key.path == "tma" and warp_specialized and not gluon_missing():
            more = _DEPTHS.get(scratch.kernel, {}) if target.consumers == 2 else _CONSUMER_WARPS
            choices, shipped = _WARP_SPECIALIZED_CHOICES | more, target.tiles[warp_specialized]
            search = _Search(warp_specialized, scratch, shipped, tuned, choices)
            faster = yield from _descend(search, timer, expected)
            if faster and (target.warp_specializes or faster.ms < (1 - _MIN_SAVING) * found.ms):
                tuned[warp_specialized] = faster.tile
                yield faster


class _Search(NamedTuple):
    """A search for one kernel's tile that starts from the shipped one; `tuned`: tiles of kernels tuned before."""

    key: Key
    scratch: _Scratch
    shipped: Tile
    tuned: dict[Key, Tile]
    choices: dict[str, tuple[int, ...]]

    def settings(self, tile: Tile) -> Settings:
        """Return settings that give the kernel that tile."""
        return Settings(self.key.path == "warp_specialized", self.tuned | {self.key: tile})


def _descend(search: _Search, timer: Timer, expected: list[Tensor]) -> Generator[Trial, None, Found | None]:
    """Find the fastest tile, changing one number at a time; None if the shipped tile fails or gives other results."""
    key, scratch, best = search.key, search.scratch, search.shipped
    settings = search.settings(best)
    try:
        if not _agree(scratch.results(settings), expected):
            yield Trial(key, best, None, "other results than the kernel that is not warp-specialized")
            return None
    except Exception as error:  # whatever the compiler and the launcher raise
        yield Trial(key, best, None, type(error).__name__)
        return None
    best_ms = shipped_ms = timer(partial(scratch.run, settings))
    tried = {best}
    while candidate := next((tile for tile in _neighbours(best, search.choices) if tile not in tried), None):
        tried.add(candidate)
        settings = search.settings(candidate)
        try:
            results = scratch.results(settings)
            ms = timer(partial(scratch.run, settings))
        except Exception as error:  # whatever the compiler and the launcher raise
            yield Trial(key, candidate, None, type(error).__name__)
            continue
        if not _agree(results, expected):
            yield Trial(key, candidate, None, "other results than the shipped tile's")
            continue
        yield Trial(key, candidate, ms)
        if ms < (1 - _MIN_SAVING) * best_ms:
            best, best_ms = candidate, ms
    return Found(key, search.shipped, shipped_ms, best, best_ms)


def _neighbours(tile: Tile, choices: dict[str, tuple[int, ...]]) -> Iterator[Tile]:
    """Yield tiles that differ in one number: the next smaller or the next larger of its choices."""
    for name, values in choices.items():
        value = getattr(tile, name)
        yield from (tile._replace(**{name: v}) for v in values if v < value and not any(v < w < value for w in values))
        yield from (tile._replace(**{name: v}) for v in values if v > value and not any(value < w < v for w in values))


def _agree(results: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether results differ only by rounding in another order: by at most 1% of the largest value."""
    return all(
        bool((a.double() - b.double()).abs().max() <= 0.01 * b.double().abs().max())
        for a, b in zip(results, expected, strict=True)
    )


def _key(kernel: str, problem: Problem) -> Key:
    """Return the key of a launch on the problem's tensors, which are contiguous."""
    itemsize, rows_per_expert = problem.dtype.itemsize, problem.rows / problem.experts
    tma_fits, vectors_fit = (
        all(size % multiple == 0 for size in (problem.hidden, problem.ffn)) for multiple in (16 // itemsize, 16)
    )
    target = select.target(problem.device, Settings(), problem.dtype)
    return select.choose(kernel, problem.dtype, target, tma_fits, vectors_fit, rows_per_expert).key


def _warp_specialized(kernel: str, problem: Problem, target: select.Target) -> Key | None:
    """Return the key of a warp-specialized launch of `_scratch_calls`, if the table has a tile for it."""
    rows_per_expert, regime = problem.rows / problem.experts, small(problem.hidden, problem.ffn)
    if kernel == "dgrad_act":
        regime = small(problem.hidden)
    elif kernel == "wgrad":
        regime = regime_of_wgrad(rows_per_expert, True, 4)
        if problem.hidden % 8:
            regime = "mma_add"
    on = replace(target, settings=Settings(True))
    chosen = next(select.choices(kernel, problem.dtype, on, rows_per_expert, regime=regime), None)
    return chosen.key if chosen and chosen.path == "warp_specialized" else None


def _scratch_calls(problem: Problem) -> Iterator[_Scratch]:
    """Yield a call for every kernel. The one of fc1_act also runs gemm, which is tuned by then."""
    E, H, F, R = problem.experts, problem.hidden, problem.ffn, problem.rows

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=problem.dtype, device=problem.device).div_(shape[-1] ** 0.5)

    x, dy, a, h = random(R, H), random(R, H), random(R, F), random(R, 2 * F)
    fc1, fc2, probs = random(E, 2 * F, H), random(E, H, F), torch.rand(R, device=problem.device)
    counts = torch.tensor([R // E + (e < R % E) for e in range(E)], device=problem.device)
    offsets = triton_impl.expert_offsets(counts, R)
    dw = torch.zeros(E, H, F, device=problem.device)
    forward = MLPArguments(
        x=x,
        x_scales=None,
        fc1=[fc1],
        fc2=[fc2],
        bias1=[],
        bias2=[],
        offsets=offsets,
        row_ids=None,
        probs=probs,
        activation=Activation("swiglu").encoded,
        recipe="",
        impl="triton",
    )
    backward = MLPBackwardArguments.of(
        forward,
        dw1=[],
        dw2=[],
        db1=[],
        db2=[],
        dy=dy,
        h=h,
        places=None,
        accumulate1=False,
        accumulate2=False,
        need_dx=False,
        keep=True,
    )

    def wgrad(settings: Settings) -> list[Tensor]:
        triton_impl.wgrad_of_segments_.run(([dw], [], (dy,), (a,), (offsets,), (), (), True, ""), settings)
        return [dw]

    def dgrad_act(settings: Settings) -> list[Tensor]:
        return list(triton_impl.grouped_mlp_backward_.run(backward.without_impl, settings))[1:]

    def fc1_act(settings: Settings) -> list[Tensor]:
        return list(triton_impl.grouped_mlp.run(forward.without_impl, settings))

    yield _Scratch("gemm", lambda settings: [triton_impl.grouped_gemm.run((a, [fc2], [], offsets, ""), settings)])
    yield _Scratch("fc1_act", fc1_act)
    yield _Scratch("dgrad_act", dgrad_act)
    yield _Scratch("wgrad", wgrad, dw.zero_)


def _gpu_timer(run: Callable[[], object]) -> float:
    ms: float = triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median")
    return ms
