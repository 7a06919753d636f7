"""Launches of layers with 8-bit recipes, and their limit times.

An 8-bit product has half the bytes of one in bf16, and takes tensor cores half the time. Weights are quantized in every
forward and every backward, as the library does without `quantized_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.limits import scope as scopes
from bench.limits.gpus import limit_ms
from bench.limits.scope import Scope
from bench.limits.shapes import Shape
from fusedmlp.kernels.launching import cost
from fusedmlp.kernels.launching.cost import Cost
from fusedmlp.kernels.tiles import table
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.recipe import BLOCKS

_BF16, _FP32 = 2, 4  # bytes
SPEED = 2  # products of 8 bits in the time of one of bf16, by the datasheets of H100, H200 and B200
MULTIPLYING = ("fc1", "fc2", "dgrad", "dx", "wgrad fc2", "wgrad fc1")


def passes(shape: Shape, rows: list[int], recipe: Recipe) -> dict[str, Cost]:
    """All launches of a gated layer with routing probabilities and fp32 main_grad, but those that plan a load."""
    E, H, F, G = shape.E, shape.H, shape.F, 2 * shape.F

    def weights(N: int, K: int, by_in: bool) -> Cost:
        return cost.quantize_weights(E, N, K, _BF16, recipe, by_in=by_in, by_out=not by_in)

    def gemm(N: int, K: int) -> Cost:
        return cost.gemm_quantized(rows, N, K, recipe, _BF16)

    def wgrad(N: int, K: int) -> Cost:
        return cost.wgrad_quantized(rows, N, K, _FP32, accumulate=True)

    return {
        "quantize x": cost.quantize(rows, H, _BF16, token_copy=False),
        "quantize fc1": weights(G, H, True),
        "fc1": cost.fc1_act_quantized(rows, H, F, recipe, _BF16),
        "quantize fc2": weights(H, F, True),
        "fc2": gemm(H, F),
        "quantize dy": cost.quantize(rows, H, _BF16),
        "quantize fc2 for dgrad": weights(H, F, False),
        "dgrad": gemm(F, H),
        "dgrad_act_quantize": cost.dgrad_act_quantize(rows, F, _BF16),
        "quantize fc1 for dx": weights(G, H, False),
        "dx": gemm(H, G),
        "wgrad fc2": wgrad(H, F),
        "quantize x for wgrad": cost.quantize(rows, H, _BF16, row_copy=False),
        "wgrad fc1": wgrad(G, H),
    }


def recipe_of(architecture: str) -> Recipe | None:
    """The recipe that an architecture has warp-specialized GEMMs for."""
    tiles = table.TABLES[architecture]
    recipes = (r for r in table.RECIPES[architecture] if table.Key("gemm", "warp_specialized", r, "long") in tiles)
    return next(recipes, None)


def rows(scope: Scope = scopes.ALL) -> Iterator[dict[str, Any]]:
    """One row for each GPU with a recipe, shape that its blocks fit, load and launch."""
    for gpu in scope.gpus:
        if (recipe := recipe_of(gpu.architecture)) is None:
            continue
        for shape in scope.shapes:
            if shape.H % BLOCKS[recipe] or shape.F % BLOCKS[recipe]:
                continue
            for load, count in scope.loads.items():
                for name, each in passes(shape, count(shape), recipe).items():
                    flops = each.flops if name in MULTIPLYING else 0
                    yield {
                        "gpu": gpu.name,
                        "recipe": recipe,
                        "shape": shape.name,
                        "load": load,
                        "pass": name,
                        "flops": flops,
                        "bytes": each.bytes,
                        "limit_ms": limit_ms(flops, each.bytes, SPEED * gpu.bf16_flops, gpu.bandwidth),
                    }
