"""Time of every pass by a model of its compiled code, beside its limit: the worth of a change of a kernel.

It rests on the table of `proof.budgets` (a row is a kernel's `MainLoop`), on the tiles of `kernels/tiles/table.py` and
on the constants of `rates`. `bench.limits.published` compares it with measurements that others published. The time of
a tile is

    steps * max(tensor cores, shared memory, L2, issue, arrival of operands) + bubble

Arrival is the time of a load and of its product, as far as the buffers and the kernel's order leave one waiting for the
other. Issue is the time of a step's instructions, of all warps on four schedulers, with its waits and barriers. The
bubble is the time of a tile beside its steps: instructions, stores and waits for them, barriers, and, unless steps and
tiles are one loop, the time until its first operands arrive. Multiprocessors take tiles as in `balance`. The clock
falls with the share of cycles in which tensor cores multiply. No pass is faster than its bytes go through memory.

Not modelled: loads by pointers and gathers, whose kernels get no figure; bank conflicts of shared memory, misses of L2,
misses of the instruction cache, memory and products that wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.limits import balance, rates, roofline
from bench.limits import scope as scopes
from bench.limits.gpus import GPU, GPUS, limit_ms
from bench.limits.rates import Rates
from bench.limits.scope import Scope
from bench.limits.shapes import Shape
from bench.proof import budgets
from bench.proof.main_loop import MainLoop
from fusedmlp.kernels.launching.cost import product_flops
from fusedmlp.kernels.tiles.table import Tile

# Order in which loads and products of a kernel wait for each other.
# ring: a buffer is loaded as soon as its product is done.
# drains: a warp waits for its last product before it issues the next.
# serial: a warp waits for a product once it is issued.
Order = Literal["ring", "drains", "serial"]
TOTALS = {
    "forward": roofline.FORWARD,
    "backward": roofline.BACKWARD,
    "both": roofline.FORWARD + roofline.BACKWARD,
}


class Kernel(NamedTuple):
    """A compiled kernel, as far as its time depends on it."""

    loop: MainLoop
    rows: int  # of the accumulator
    columns: int
    depth: int  # of the reduction, in a step
    warps: int  # that execute a step's instructions
    buffers: int  # steps whose operands shared memory holds
    stored: float  # bytes for each element of the accumulator
    order: Order = "ring"
    itemsize: int = 2  # bytes of an operand's element
    trips: int = 1  # loads from L2, one after another, before a tile's first operands can be loaded
    programs: int = 1  # on one multiprocessor
    loads: float = 1  # share of the columns' operand that a block loads; the rest comes from its cluster
    holds: float = 1  # share of it in the block's shared memory; tensor cores read the rest from the other block's
    last_store_waits: bool = False  # the next tile's products wait until a tile's last store has read its buffer


class _Pass(NamedTuple):
    """Facts of a kernel of this library beside its tile."""

    widths: int  # the accumulator's width, in widths of the tile
    stored: float
    trips: int = 1


PASSES = {
    "fc1_act": _Pass(widths=2, stored=3),  # gate and linear part; for two of them an activation
    "gemm": _Pass(widths=1, stored=2),
    "dgrad_act": _Pass(widths=1, stored=6),  # two gradients and an activation
    "wgrad": _Pass(widths=1, stored=4, trips=2),  # the expert of a tile, its rows
}
WARP_SPECIALIZED = "_warp_specialized"  # what the table adds to the name of a warp-specialized kernel


class Cost(NamedTuple):
    """Cycles of a tile that has its multiprocessor for itself."""

    step: float
    busy: float  # cycles of a step in which a resource of the multiprocessor is taken
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
        if costs["joined"] is None:  # a table from before that column
            costs["joined"] = kernel not in ("dgrad_act", "wgrad")
    return {kernel: MainLoop(**costs) for kernel, costs in found.items()}


def kernel_of(name: str, loop: MainLoop, tile: Tile) -> Kernel:
    """A kernel of this library, by its name in the table of budgets, with bf16 operands.

    In a warp-specialized one two warpgroups multiply, or one warp does and others store.
    """
    name, warp_specialized, _ = name.partition(WARP_SPECIALIZED)
    about = PASSES[name]
    rows, columns, depth = tile.BLOCK_M, about.widths * tile.BLOCK_N, tile.BLOCK_K
    if name == "wgrad":
        rows, columns, depth = tile.BLOCK_N, tile.BLOCK_K, tile.BLOCK_M
    warps = 2 * tile.num_warps if warp_specialized and loop.joined != 2 else tile.num_warps
    order: Order = "serial" if loop.mma_in_flight == 0 else "ring"
    return Kernel(
        loop,
        rows,
        columns,
        depth,
        warps,
        tile.num_stages,
        about.stored,
        order,
        trips=about.trips,
        programs=max(tile.PER_SM, 1),
    )


def tile_cost(kernel: Kernel, rate: Rates) -> Cost:
    """Cost of a tile of one kernel.

    Raises:
        ValueError: the kernel loads by pointers, which the model predicts badly.
    """
    loop = kernel.loop
    if loop.loads_in_flight is not None:
        raise ValueError("expected a kernel that loads by TMA; got cp.async, for which the model has no figure")
    cycles = kernel.warps / (4 * rate.issue)  # for an instruction of every warp
    issue = loop.instructions * cycles + loop.waits * rate.wait + loop.barriers * rate.barrier
    product = product_flops(kernel.rows, kernel.columns, kernel.depth) / (rate.tensor * 2 / kernel.itemsize)
    of_rows, of_columns = (kernel.itemsize * kernel.depth * width for width in (kernel.rows, kernel.columns))
    written = of_rows + of_columns * kernel.holds
    reads = of_rows + of_columns * kernel.holds * math.ceil(kernel.rows / rate.tensor_rows)
    load = rate.latency + written / rate.port
    alone = max(product, reads / rate.shared)  # of a product while nothing is loaded
    busy = {
        "tensor": product,
        "shared": (written + reads) / rate.shared,
        "L2": (of_rows + of_columns * kernel.loads) / rate.l2,
        "issue": issue,
    }
    ways = busy | {"arrival": _arrival(kernel, load, alone, issue, rate)}
    if kernel.order == "serial":
        ways["issue"] += alone
    bound = max(ways, key=lambda way: ways[way])
    # A store waits until the one before has left its buffer, as fast as L2 takes it.
    stores = max(loop.tile_stores, 1)
    waited = kernel.stored * kernel.rows * kernel.columns * (1 - (not kernel.last_store_waits) / stores)
    bubble = rate.tile + loop.tile_instructions * cycles + waited / rate.l2
    bubble += loop.tile_stores * rate.store + loop.tile_waits * rate.store_wait + loop.tile_barriers * rate.barrier
    start = kernel.trips * rate.trip + load
    if loop.joined:
        return Cost(ways[bound], max(busy.values()), bound, bubble, start, loop.joined == 2)
    return Cost(ways[bound], max(busy.values()), bound, bubble + start, 0.0)


def _arrival(kernel: Kernel, load: float, product: float, issue: float, rate: Rates) -> float:
    """Cycles of a step by its load and its product alone."""
    if kernel.buffers == 1:
        return load + product + issue
    if kernel.order == "drains":
        return max(product + rate.gap, load / (kernel.buffers - 1))
    return (load + product) / kernel.buffers


def tile_steps(kernel: str, tile: Tile, rows: Sequence[int], N: int, K: int) -> list[tuple[int, int]]:
    """`(steps of a tile, number of such tiles)` in the order of work; N and K as in `balance.passes`."""
    if kernel == "wgrad":
        per_expert = -(-N // tile.BLOCK_N) * -(-K // tile.BLOCK_K)
        return [(-(-n // tile.BLOCK_M), per_expert) for n in sorted(rows, reverse=True) if n]
    num_tiles = sum(-(-n // tile.BLOCK_M) for n in rows) * -(-N // tile.BLOCK_N)
    return [(-(-K // (PASSES[kernel].widths * tile.BLOCK_K)), num_tiles)]


def cycles(
    cost: Cost, steps: Sequence[tuple[int, int]], processors: int, launch: float, programs: int = 1, *, persistent: bool
) -> float:
    """Cycles until the last multiprocessor is done.

    `programs` that share a multiprocessor work during each other's waits and bubbles, as far as its resources are free.
    One that is not `persistent` has one tile. `launch`: cycles until a block's first instruction.
    """
    costs: list[float] = []
    for n, count in steps:
        own = max(n * cost.step, cost.bubble) if cost.apart and persistent else n * cost.step + cost.bubble
        own += 0 if persistent else cost.start + launch
        costs += [max(n * cost.busy, own / programs)] * count
    busy = sum(costs) / (processors * (1 - balance.idle_share(costs, processors, persistent)))
    return busy + cost.start + launch if persistent else busy


def seconds(cycles: float, flops: float, processors: int, rate: Rates, itemsize: int = 2) -> float:
    """Time of that many cycles with `flops` in them, at the clock that power allows."""
    used = flops / (cycles * processors * rate.tensor * 2 / itemsize)
    return cycles / min(rate.clock_most, rate.clock * used**-rate.clock_falls) if used else cycles / rate.clock_most


def passes(
    gpu: GPU, shape: Shape, rows: Sequence[int], by: dict[str, MainLoop], rate: Rates, warp_specialized: bool = False
) -> dict[str, Time]:
    """Time of every pass of a layer; `by`: facts of the GPU's kernels; `warp_specialized`: by warp-specialized ones."""
    least, times = roofline.passes(shape, list(rows)), {}
    for name, (kernel, N, K) in balance.passes(shape).items():
        tile = balance.tile_of(kernel, rows, gpu.architecture, warp_specialized)
        variant = kernel + WARP_SPECIALIZED if warp_specialized and kernel + WARP_SPECIALIZED in by else kernel
        about = kernel_of(variant, by[variant], tile)
        cost, steps = tile_cost(about, rate), tile_steps(kernel, tile, rows, N, K)
        persistent = kernel != "wgrad" or balance.dealt_out(kernel, rows, N, K, gpu, warp_specialized)
        taken = cycles(cost, steps, gpu.processors, rate.launch, about.programs, persistent=persistent)
        compute = seconds(taken, least[name].flops, gpu.processors, rate)
        memory = least[name].bytes / (gpu.bandwidth * rate.memory)
        times[name] = Time(1e6 * max(compute, memory), "memory" if memory > compute else cost.bound, cost)
    return times


def modelled(gpus: Sequence[GPU] = GPUS) -> list[GPU]:
    """GPUs that have kernels in the table, and constants in `rates`."""
    return [gpu for gpu in gpus if facts(gpu.architecture) and gpu.architecture in rates.RATES]


def rows(
    before: Path | None = None,
    warp_specialized: bool = False,
    cublas: float | None = None,
    scope: Scope = scopes.ALL,
) -> Iterator[dict[str, Any]]:
    """One row per GPU, shape, load and pass, and for forward, backward and both; `before`: a table to compare with.

    `warp_specialized`: warp-specialized kernels, of GPUs that have them, compared with the default ones. `cublas`:
    TFLOP/s of cuBLAS at 8192 cubed on the machine that is meant; GPUs that cannot reach it are left out. Without it,
    rows have the figures of the slowest and the fastest machine that is known, too.
    """
    for gpu in modelled(scope.gpus):
        by, machines = facts(gpu.architecture), rates.anchored(gpu.architecture, cublas)
        if not machines or (warp_specialized and not any(name.endswith(WARP_SPECIALIZED) for name in by)):
            continue
        old = facts(gpu.architecture, before) if before else by if warp_specialized else {}
        for shape in scope.shapes:
            for load, count in scope.loads.items():
                loads = count(shape)
                least = roofline.passes(shape, loads)
                by_machine = [passes(gpu, shape, loads, by, rate, warp_specialized) for rate in machines]
                times_before = passes(gpu, shape, loads, old, machines[0]) if old else {}
                for name, parts in ({name: (name,) for name in by_machine[0]} | TOTALS).items():
                    flops = sum(least[part].flops for part in parts)
                    us, *others = (sum(times[part].us for part in parts) for times in by_machine)
                    limits = (limit_ms(least[p].flops, least[p].bytes, gpu.bf16_flops, gpu.bandwidth) for p in parts)
                    limit_us = 1e3 * sum(limits)
                    row = {
                        "gpu": gpu.name,
                        "shape": shape.name,
                        "load": load,
                        "pass": name,
                        "us": us,
                        "within": rates.WITHIN[gpu.architecture],
                        "tflops": flops / us / 1e6,
                        "machines": [flops / other / 1e6 for other in others],
                        "limit_us": limit_us,
                        "of_limit": limit_us / us,
                    }
                    if name in by_machine[0]:
                        time = by_machine[0][name]
                        row |= {"bound": time.bound, "step_cycles": time.cost.step, "bubble_cycles": time.cost.bubble}
                    if times_before:
                        row["us_before"] = sum(times_before[part].us for part in parts)
                    yield row
