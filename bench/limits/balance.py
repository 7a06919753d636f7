"""How evenly the kernels' order of tiles keeps a GPU's multiprocessors busy, by simulation.

Every kernel works through a list of tiles. Either each tile has a program of its own, and the next one starts wherever
a multiprocessor is free; or each of n persistent programs takes every n-th tile (there and back in wgrad, whose tiles
do not cost the same). Programs that share a multiprocessor count as one. A tile's cost is the time of its arithmetic
and of its weight gradient's traffic on one multiprocessor's share of the GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.limits import scope as scopes
from bench.limits.gpus import GPU
from bench.limits.scope import Scope
from bench.limits.shapes import Shape
from fusedmlp.kernels.device import tile_order
from fusedmlp.kernels.launching.cost import product_flops
from fusedmlp.kernels.tiles import select, table

_GRAD_BYTES = 8  # fp32, read and written


def idle_share(costs: Sequence[float], processors: int, dealt_out: bool = False) -> float:
    """Share of the processors' time in which they are idle, until the last is done. `costs` must not rise.

    `dealt_out`: programs take tiles in turns, there and back; otherwise the first free processor takes the next.
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
        return [product_flops(tile.BLOCK_M, tile.BLOCK_N, K) / flop_rate] * num_tiles
    per_expert = -(-N // tile.BLOCK_N) * -(-K // tile.BLOCK_K)
    grad_bytes = _GRAD_BYTES * tile.BLOCK_N * tile.BLOCK_K
    costs = []
    for n in sorted((n for n in rows if n), reverse=True):
        padded = -(-n // tile.BLOCK_M) * tile.BLOCK_M
        flops = product_flops(tile.BLOCK_N, tile.BLOCK_K, padded)
        costs += [flops / flop_rate + grad_bytes / bandwidth] * per_expert
    return costs


def dealt_out(kernel: str, rows: Sequence[int], N: int, K: int, gpu: GPU) -> bool:
    """Whether tiles of different costs go to programs in turns."""
    tile = tile_of(kernel, rows, gpu.architecture)
    programs = gpu.processors * tile.PER_SM
    return kernel == "wgrad" and tile_order.deals_out(-(-N // tile.BLOCK_N) * -(-K // tile.BLOCK_K), programs)


def tile_of(kernel: str, rows: Sequence[int], architecture: str) -> table.Tile:
    """The tile that a plan chooses for 16-bit elements where sizes and addresses fit descriptors."""
    target = select.Target(architecture, 1, table.TABLES[architecture])
    regime: table.Regime = "mma_add" if kernel == "wgrad" else "any"
    return select.choose(kernel, torch.bfloat16, target, True, True, sum(rows) / len(rows), regime=regime).tile


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


def rows(scope: Scope = scopes.ALL) -> Iterator[dict[str, Any]]:
    """One row per GPU, shape, load and pass."""
    for gpu in scope.gpus:
        for shape in scope.shapes:
            for load, count in scope.loads.items():
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
