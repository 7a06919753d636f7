"""How evenly the kernels' order of tiles keeps a GPU's multiprocessors busy, by simulation.

Every kernel works through a list of tiles. Each tile has a program of its own, which start in that order wherever a
multiprocessor is free, or persistent programs take every n-th (there and back in wgrad, whose tiles do not cost the
same). Programs that share a multiprocessor are one here. A tile's cost is the time of its arithmetic and of its weight
gradient's traffic on one multiprocessor's share of the GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from bench.limits.gpus import GPU, GPUS
from bench.limits.shapes import LOADS, SHAPES, Shape
from fusedmlp.kernels.device import tile_order
from fusedmlp.kernels.tiles import table

_GRAD_BYTES = 8  # fp32, read and written


def idle_share(costs: Sequence[float], processors: int, dealt_out: bool = False) -> float:
    """Share of the processors' time, until the last is done, in which they have nothing to do. Costs never rise.

    `dealt_out`: in turns there and back, not to whoever is free.
    """
    if not costs:
        return 0.0
    if costs[0] == costs[-1]:  # all equal, as costs never rise: full rounds and one that may not be
        return 1 - len(costs) / (processors * -(-len(costs) // processors))
    busy_until = [0.0] * processors
    if dealt_out:
        for program in range(processors):
            turns = range(tile_order.num_turns.fn(len(costs), program, processors))
            busy_until[program] = sum(costs[tile_order.tile_index_at.fn(turn, program, processors)] for turn in turns)
    else:
        for cost in costs:
            heapq.heapreplace(busy_until, busy_until[0] + cost)
    return 1 - sum(costs) / (processors * max(busy_until))


def tile_costs(kernel: str, rows: Sequence[int], N: int, K: int, gpu: GPU) -> list[float]:
    """Seconds of every tile in the order in which they are taken.

    M-ragged passes: `[R, K] @ [K, N]`, and all tiles cost the same, since rows beyond an expert's last are multiplied
    too. wgrad: `[N, R] @ [R, K]`, experts by falling number of rows, those without any left out.
    """
    tile = tile_of(kernel, rows, gpu.architecture)
    flop_rate, bandwidth = gpu.bf16_flops / gpu.processors, gpu.bandwidth / gpu.processors
    if kernel != "wgrad":
        num_tiles = sum(-(-n // tile.BLOCK_M) for n in rows) * -(-N // tile.BLOCK_N)
        return [2 * tile.BLOCK_M * tile.BLOCK_N * K / flop_rate] * num_tiles
    per_expert = -(-N // tile.BLOCK_N) * -(-K // tile.BLOCK_K)
    area = tile.BLOCK_N * tile.BLOCK_K
    costs = []
    for n in sorted((n for n in rows if n), reverse=True):
        padded = -(-n // tile.BLOCK_M) * tile.BLOCK_M
        costs += [2 * padded * area / flop_rate + _GRAD_BYTES * area / bandwidth] * per_expert
    return costs


def dealt_out(kernel: str, rows: Sequence[int], N: int, K: int, gpu: GPU, specialised: bool = False) -> bool:
    """Whether tiles of different costs go to programs in turns."""
    tile = tile_of(kernel, rows, gpu.architecture, specialised)
    programs = gpu.processors * tile.PER_SM
    return kernel == "wgrad" and tile_order.deals_out(-(-N // tile.BLOCK_N) * -(-K // tile.BLOCK_K), programs)


def tile_of(kernel: str, rows: Sequence[int], architecture: str, specialised: bool = False) -> table.Tile:
    """The one that the launchers choose where sizes and addresses fit descriptors, for 16 bits an element;
    `specialised`: if they are to use warp-specialized kernels, where there are any.
    """
    rows_of, shape = table.TABLES[architecture], table.shape_class(sum(rows) / len(rows))
    paths: list[table.Path] = ["specialised", "tma", "pointer"]
    own = (rows_of.get((kernel, path, 16), {}) for path in paths[0 if specialised else 1 :])
    return next(tiles[shape] for tiles in own if shape in tiles)


def passes(shape: Shape) -> dict[str, tuple[str, int, int]]:
    """Kernel, N and K of every pass, as `tile_costs` takes them."""
    H, F, G = shape.H, shape.F, 2 * shape.F
    return {
        "fc1_act": ("fc1_act", F, 2 * H),  # two GEMMs over the same columns
        "fc2": ("gemm", H, F),
        "dgrad_act": ("dgrad_act", F, H),
        "dx": ("gemm", H, G),
        "wgrad fc2": ("wgrad", H, F),
        "wgrad fc1": ("wgrad", G, H),
    }


def rows() -> Iterator[dict[str, Any]]:
    """One row per GPU, shape, load and pass."""
    for gpu in GPUS:
        for shape in SHAPES:
            for load, count in LOADS.items():
                for name, (kernel, N, K) in passes(shape).items():
                    costs = tile_costs(kernel, count(shape), N, K, gpu)
                    in_turns = dealt_out(kernel, count(shape), N, K, gpu)
                    yield {
                        "gpu": gpu.name,
                        "shape": shape.name,
                        "load": load,
                        "pass": name,
                        "tiles": len(costs),
                        "tiles_per_processor": len(costs) / gpu.processors,
                        "idle": idle_share(costs, gpu.processors, in_turns),
                    }
