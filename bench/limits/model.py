"""Time of every pass by a model of its compiled code, beside its limit: the worth of a change of a kernel.

It rests on the table of `proof.budgets` (a row is a kernel's `MainLoop`), on the tiles of `kernels/tiles/table.py` and
on the constants of `rates`. The time of a tile is

    steps * max(tensor cores, L2, issue, arrival of loads) + bubble

Issue is the time of a step's instructions, of all warps on four schedulers, with its waits and barriers; where no MMA
is left in flight, the tensor cores' time is added, as they are idle meanwhile. The bubble is the time of a tile beside
its steps: instructions, stores and waits for them, barriers, and, unless steps and tiles are one loop, the time until
its first operands arrive. Multiprocessors take tiles as in `balance`. No pass is faster than its bytes go through
memory.

Not modelled: launches, power, bank conflicts of shared memory, misses of L2, misses of the instruction cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.limits import balance, rates, roofline
from bench.limits.gpus import GPU, GPUS, limit_ms
from bench.limits.rates import Rates
from bench.limits.shapes import LOADS, SHAPES, Shape, even
from bench.proof import budgets
from bench.proof.main_loop import MainLoop
from fusedmlp.kernels.launching.cost import product_flops
from fusedmlp.kernels.tiles.table import Tile

_BF16 = 2  # bytes


class Kernel(NamedTuple):
    """Facts of a kernel that neither the table nor a tile has."""

    widths: int  # the accumulator's width, in widths of the tile
    stored: float  # bytes stored for each element of the accumulator
    trips: int  # loads from L2, one after another, before a tile's first operands can be loaded
    joined: bool  # whether steps and tiles are one loop, for tables that are older than that column


KERNELS = {
    "fc1_act": Kernel(widths=2, stored=3, trips=1, joined=True),  # gate and linear part; for two of them an activation
    "gemm": Kernel(widths=1, stored=2, trips=1, joined=True),
    "dgrad_act": Kernel(widths=1, stored=6, trips=1, joined=False),  # two gradients and an activation
    "wgrad": Kernel(widths=1, stored=4, trips=2, joined=False),  # the expert of a tile, its rows
}
WARP_SPECIALIZED = "_warp_specialized"  # what the table adds to the name of a warp-specialized kernel
TOTALS = {
    "forward": roofline.FORWARD,
    "backward": roofline.BACKWARD,
    "both": roofline.FORWARD + roofline.BACKWARD,
}


class Cost(NamedTuple):
    """Cycles of a tile that has its multiprocessor for itself."""

    step: float
    bound: str  # what bounds a step
    bubble: float
    start: float  # until a program's first step, where it is no part of the bubble
    apart: bool = False  # other warps do the bubble's work, during the next tile's steps


class Time(NamedTuple):
    """Time of a pass."""

    us: float
    bound: str  # "memory", or what bounds a step
    cost: Cost


def facts(architecture: str, table: Path = budgets.TABLE) -> dict[str, MainLoop]:
    """`MainLoop` of each kernel with its tiles for long loads; empty if the table has no rows of that architecture."""
    found: dict[str, dict[str, Any]] = budgets.allowed(architecture, table)
    for kernel, costs in found.items():
        if costs["joined"] is None:  # others than those of KERNELS are warp-specialized
            costs["joined"] = kernel not in KERNELS or KERNELS[kernel].joined
    return {kernel: MainLoop(**costs) for kernel, costs in found.items()}


def tile_cost(
    kernel: str, fact: MainLoop, tile: Tile, rate: Rates, itemsize: int = _BF16, about: Kernel | None = None
) -> Cost:
    """Cost of a tile of one kernel; `itemsize`: bytes of an operand's element; `about`: in place of that of KERNELS.

    In a warp-specialized kernel two warpgroups multiply, or one warp does and others store.
    """
    kernel, warp_specialized, _ = kernel.partition(WARP_SPECIALIZED)
    about = about or KERNELS[kernel]
    rows, columns, depth = tile.BLOCK_M, about.widths * tile.BLOCK_N, tile.BLOCK_K
    if kernel == "wgrad":
        rows, columns, depth = tile.BLOCK_N, tile.BLOCK_K, tile.BLOCK_M
    warps = 2 * tile.num_warps if warp_specialized and fact.joined != 2 else tile.num_warps
    cycles = warps / (4 * rate.issue)  # for an instruction of every warp
    tensor = product_flops(rows, columns, depth) / (rate.tensor * _BF16 / itemsize)
    issue = fact.instructions * cycles + fact.waits * rate.wait + fact.barriers * rate.barrier
    ahead = tile.num_stages - 1 if fact.loads_in_flight is None else fact.loads_in_flight
    ways = {
        "tensor": tensor,
        "L2": itemsize * (rows + columns) * depth / rate.l2,
        "issue": issue + (tensor if fact.mma_in_flight == 0 else 0),
        "arrival": rate.first_load / ahead if ahead else rate.first_load + issue + tensor,
    }
    bound = max(ways, key=lambda way: ways[way])
    # A store waits until the one before has left its buffer, as fast as L2 takes it; nothing waits for the last.
    waited = about.stored * rows * columns * (1 - 1 / max(fact.tile_stores, 1))
    bubble = fact.tile_instructions * cycles + waited / rate.l2
    bubble += fact.tile_stores * rate.store + fact.tile_waits * rate.store_wait + fact.tile_barriers * rate.barrier
    start = about.trips * rate.trip + rate.first_load
    if fact.joined:
        return Cost(ways[bound], bound, bubble, start, fact.joined == 2)
    return Cost(ways[bound], bound, bubble + start, 0.0)


def tile_steps(kernel: str, tile: Tile, rows: Sequence[int], N: int, K: int) -> list[tuple[int, int]]:
    """`(steps of a tile, number of such tiles)` in the order of work; N and K as in `balance.passes`."""
    if kernel == "wgrad":
        per_expert = -(-N // tile.BLOCK_N) * -(-K // tile.BLOCK_K)
        return [(-(-n // tile.BLOCK_M), per_expert) for n in sorted(rows, reverse=True) if n]
    num_tiles = sum(-(-n // tile.BLOCK_M) for n in rows) * -(-N // tile.BLOCK_N)
    return [(-(-K // (KERNELS[kernel].widths * tile.BLOCK_K)), num_tiles)]


def cycles(
    cost: Cost, steps: Sequence[tuple[int, int]], tile: Tile, processors: int, *, persistent: bool = True
) -> float:
    """Cycles until the last multiprocessor is done.

    Programs that share a multiprocessor multiply during each other's bubbles. One that is not `persistent` has one
    tile.
    """
    programs = max(tile.PER_SM, 1)
    costs: list[float] = []
    for n, count in steps:
        stepping = n * cost.step
        whole = max(stepping, cost.bubble) if cost.apart and persistent else stepping + cost.bubble
        costs += [max(stepping, (whole if persistent else whole + cost.start) / programs)] * count
    busy = sum(costs) / (processors * (1 - balance.idle_share(costs, processors, persistent)))
    return busy + cost.start if persistent else busy


def passes(
    gpu: GPU, shape: Shape, rows: Sequence[int], by: dict[str, MainLoop], rate: Rates, warp_specialized: bool = False
) -> dict[str, Time]:
    """Time of every pass of a layer; `by`: facts of the GPU's kernels; `warp_specialized`: by warp-specialized ones."""
    least, times = roofline.passes(shape, list(rows)), {}
    for name, (kernel, N, K) in balance.passes(shape).items():
        tile = balance.tile_of(kernel, rows, gpu.architecture, warp_specialized)
        variant = kernel + WARP_SPECIALIZED if warp_specialized and kernel + WARP_SPECIALIZED in by else kernel
        cost = tile_cost(variant, by[variant], tile, rate)
        steps = tile_steps(kernel, tile, rows, N, K)
        persistent = kernel != "wgrad" or balance.dealt_out(kernel, rows, N, K, gpu, warp_specialized)
        compute = cycles(cost, steps, tile, gpu.processors, persistent=persistent) / rate.clock
        memory = least[name].bytes / (gpu.bandwidth * rate.memory)
        times[name] = Time(1e6 * max(compute, memory), "memory" if memory > compute else cost.bound, cost)
    return times


def uncertainty(gpu: GPU) -> float:
    """Uncertainty of the time of all passes of all shapes with even loads, as a share of it.

    It follows from the uncertainties of `rates`, taken as independent.
    """
    by = facts(gpu.architecture)

    def total(off: str | None) -> float:
        rate = rates.of(gpu.architecture, off)
        return sum(time.us for shape in SHAPES for time in passes(gpu, shape, even(shape), by, rate).values())

    base = total(None)
    return math.hypot(*(total(name) / base - 1 for name in Rates._fields))


def modelled() -> list[GPU]:
    """GPUs that have kernels in the table, and constants in `rates`."""
    return [gpu for gpu in GPUS if facts(gpu.architecture) and gpu.architecture in rates.RATES]


def rows(before: Path | None = None, warp_specialized: bool = False) -> Iterator[dict[str, Any]]:
    """One row per GPU, shape, load and pass, and for forward, backward and both; `before`: a table to compare with.

    `warp_specialized`: warp-specialized kernels, of GPUs that have them, compared with the default ones.
    """
    for gpu in modelled():
        by, rate, within = facts(gpu.architecture), rates.of(gpu.architecture), uncertainty(gpu)
        if warp_specialized and not any(name.endswith(WARP_SPECIALIZED) for name in by):
            continue
        old = facts(gpu.architecture, before) if before else by if warp_specialized else {}
        for shape in SHAPES:
            for load, count in LOADS.items():
                loads = count(shape)
                least, times = roofline.passes(shape, loads), passes(gpu, shape, loads, by, rate, warp_specialized)
                times_before = passes(gpu, shape, loads, old, rate) if old else {}
                for name, parts in ({name: (name,) for name in times} | TOTALS).items():
                    flops = sum(least[part].flops for part in parts)
                    us = sum(times[part].us for part in parts)
                    limits = (limit_ms(least[p].flops, least[p].bytes, gpu.bf16_flops, gpu.bandwidth) for p in parts)
                    limit_us = 1e3 * sum(limits)
                    row = {
                        "gpu": gpu.name,
                        "shape": shape.name,
                        "load": load,
                        "pass": name,
                        "us": us,
                        "within": within,
                        "tflops": flops / us / 1e6,
                        "limit_us": limit_us,
                        "of_limit": limit_us / us,
                    }
                    if name in times:
                        cost = times[name].cost
                        row |= {"bound": times[name].bound, "step_cycles": cost.step, "bubble_cycles": cost.bubble}
                    if times_before:
                        row["us_before"] = sum(times_before[part].us for part in parts)
                    yield row
