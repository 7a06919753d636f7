"""Layers of 8-bit recipes by the model and by the roofline: their launches, and the time of each, beside bf16.

A launch that multiplies takes the time that `model` gives it from its compiled code, any other the time of its bytes.
An 8-bit product has half the bytes of one in bf16, and takes tensor cores half the time. Weights are quantized in
every forward and every backward, as the library does without `is_first_microbatch`; one total leaves that out.

The kernels for sm_90 add the sums of a step in registers. One consumer can do so while the other multiplies. How far
the hardware overlaps the two is not known, so there are two times: with all of it, and with none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.limits import model, rates, roofline
from bench.limits import scope as scopes
from bench.limits.gpus import GPU, limit_ms
from bench.limits.model import Time
from bench.limits.rates import Rates
from bench.limits.scope import Scope
from bench.limits.shapes import Shape
from bench.proof.main_loop import MainLoop
from fusedmlp.kernels.device.tile_order import deals_out
from fusedmlp.kernels.launching import cost
from fusedmlp.kernels.launching.cost import Cost
from fusedmlp.kernels.tiles import table
from fusedmlp.kernels.tiles.table import Recipe, Tile
from fusedmlp.recipe import BLOCKS

_BF16, _FP32, _FP8 = 2, 4, 1  # bytes
SPEED = 2  # products of 8 bits in the time of one of bf16, by the datasheets of H100, H200 and B200
# Their tiles have all of the accumulator's columns. fc1 stores these and, for two of them, an e4m3.
_STORED = {"gemm": 2, "fc1_act": 2.5, "wgrad": 4}


class Pass(NamedTuple):
    """One launch. `kernel`: "gemm", "fc1_act" or "wgrad", of `[R, K] @ [K, N]` or `[N, R] @ [R, K]`; "" for other
    launches.
    """

    cost: Cost
    kernel: str = ""
    N: int = 0
    K: int = 0


def passes(shape: Shape, rows: list[int], recipe: Recipe) -> dict[str, Pass]:
    """All launches of a gated layer with routing probabilities and fp32 main_grad, but those that plan a load."""
    E, H, F, G = shape.E, shape.H, shape.F, 2 * shape.F

    def weights(N: int, K: int, by_in: bool) -> Pass:
        return Pass(cost.quantize_weights(E, N, K, _BF16, recipe, by_in=by_in, by_out=not by_in))

    def gemm(N: int, K: int) -> Pass:
        return Pass(cost.gemm_quantized(rows, N, K, recipe, _BF16), "gemm", N, K)

    def wgrad(N: int, K: int) -> Pass:
        return Pass(cost.wgrad_quantized(rows, N, K, _FP32, accumulate=True), "wgrad", N, K)

    return {
        "quantize x": Pass(cost.quantize(rows, H, _BF16, token_copy=False)),
        "quantize fc1": weights(G, H, True),
        "fc1": Pass(cost.fc1_act_quantized(rows, H, F, recipe, _BF16), "fc1_act", G, H),
        "quantize fc2": weights(H, F, True),
        "fc2": gemm(H, F),
        "quantize dy": Pass(cost.quantize(rows, H, _BF16)),
        "quantize fc2 for dgrad": weights(H, F, False),
        "dgrad": gemm(F, H),
        "dgrad_act_quantize": Pass(cost.dgrad_act_quantize(rows, F, _BF16)),
        "quantize fc1 for dx": weights(G, H, False),
        "dx": gemm(H, G),
        "wgrad fc2": wgrad(H, F),
        "quantize x for wgrad": Pass(cost.quantize(rows, H, _BF16, row_copy=False)),
        "wgrad fc1": wgrad(G, H),
    }


OF_WEIGHTS = ("quantize fc1", "quantize fc2", "quantize fc2 for dgrad", "quantize fc1 for dx")
KEPT = "weights kept"  # forward and backward of a micro-batch that finds copies of the weights
FORWARD = ("quantize x", "quantize fc1", "fc1", "quantize fc2", "fc2")


def recipe_of(architecture: str) -> Recipe | None:
    """The recipe that an architecture has GEMMs for."""
    tiles = table.TABLES[architecture]
    return next((recipe for recipe in table.RECIPES[architecture] if _key("gemm", recipe) in tiles), None)


def _key(kernel: str, recipe: Recipe) -> table.Key:
    return table.Key(kernel, "warp_specialized", recipe, "long")


def layers(architecture: str, scope: Scope) -> Iterator[tuple[Recipe, Shape, str, list[int]]]:
    """Recipe, shape, load and rows of every expert, of the layers that the recipe's blocks fit."""
    recipe = recipe_of(architecture)
    if recipe is None:
        return
    for shape in scope.shapes:
        if shape.H % BLOCKS[recipe] == shape.F % BLOCKS[recipe] == 0:
            for load, count in scope.loads.items():
                yield recipe, shape, load, count(shape)


def times(
    gpu: GPU, shape: Shape, rows: list[int], by: dict[str, MainLoop], rate: Rates, *, overlapped: bool
) -> dict[str, Time]:
    """Time of every launch; `by`: facts of the GPU's kernels; `overlapped`: additions of one consumer with the other's
    products.
    """
    recipe = recipe_of(gpu.architecture)
    assert recipe is not None
    found = {}
    for name, each in passes(shape, rows, recipe).items():
        memory = each.cost.bytes / (gpu.bandwidth * rate.memory)
        compute, of_tile = 0.0, model.Cost(0.0, 0.0, "memory", 0.0, 0.0)
        if each.kernel:
            tile = table.TABLES[gpu.architecture][_key(each.kernel, recipe)]
            fact = by[f"{each.kernel}_{recipe}"]
            of_tile = tile_cost(each.kernel, fact, tile, rate, overlapped=overlapped)
            loop = "wgrad" if each.kernel == "wgrad" else "gemm"
            steps = model.tile_steps(loop, tile, rows, each.N, each.K)
            persistent = each.kernel != "wgrad" or _dealt_out(tile, each, gpu)
            programs = max(tile.PER_SM, 1)
            taken = model.cycles(of_tile, steps, gpu.processors, rate.launch, programs, persistent=persistent)
            compute = model.seconds(taken, each.cost.flops, gpu.processors, rate, _FP8)
        found[name] = Time(1e6 * max(compute, memory), "memory" if memory > compute else of_tile.bound, of_tile)
    return found


def _dealt_out(tile: Tile, each: Pass, gpu: GPU) -> bool:
    return deals_out(-(-each.N // tile.BLOCK_N) * -(-each.K // tile.BLOCK_K), gpu.processors * tile.PER_SM)


def tile_cost(kernel: str, fact: MainLoop, tile: Tile, rate: Rates, *, overlapped: bool) -> model.Cost:
    """Cost of a tile. With two consumers (sm_90), each waits for its own products before it adds them."""
    as_bf16 = "wgrad" if kernel == "wgrad" else "gemm"
    about = model.kernel_of(as_bf16 + model.WARP_SPECIALIZED, fact, tile)
    about = about._replace(itemsize=_FP8, stored=_STORED[kernel])
    apart = model.tile_cost(about, rate)
    if fact.mma_in_flight != 0 or not overlapped:
        return apart
    # The other consumer multiplies meanwhile: a step takes half of its products, and one consumer's instructions.
    running = model.tile_cost(about._replace(order="ring"), rate)
    products = cost.product_flops(about.rows, about.columns, about.depth) / (SPEED * rate.tensor)
    alone = fact.instructions * tile.num_warps / (4 * rate.issue)
    turn = products / 2 + alone + fact.waits * rate.wait + fact.barriers * rate.barrier
    return running if running.step >= turn else running._replace(step=turn, bound="turns")


def model_rows(scope: Scope = scopes.ALL) -> Iterator[dict[str, Any]]:
    """One row per GPU, shape, load and launch; and for forward, backward, both, and both without the quantization of
    weights, with those of bf16 beside them.

    `us`: additions overlapped; `us_apart`: not. bf16: the faster of the default and the warp-specialized kernels.
    """
    for gpu in model.modelled(scope.gpus):
        by, rate, within = model.facts(gpu.architecture), rates.of(gpu.architecture), rates.WITHIN[gpu.architecture]
        for recipe, shape, load, rows in layers(gpu.architecture, scope):
            fast, slow = (times(gpu, shape, rows, by, rate, overlapped=on) for on in (True, False))
            backward = tuple(name for name in fast if name not in FORWARD)
            totals = {"forward": FORWARD, "backward": backward, "both": (*FORWARD, *backward)}
            totals[KEPT] = tuple(name for name in totals["both"] if name not in OF_WEIGHTS)
            row = {"gpu": gpu.name, "recipe": recipe, "shape": shape.name, "load": load, "within": within}
            for name, time in fast.items():
                yield row | {"pass": name, "us": time.us, "us_apart": slow[name].us, "bound": time.bound}
            least = roofline.passes(shape, rows)
            for name, parts in totals.items():
                of_bf16 = model.TOTALS["both" if name == KEPT else name]
                flops = sum(least[part].flops for part in of_bf16)
                us, us_apart = (sum(each[part].us for part in parts) for each in (fast, slow))
                in_bf16 = min(
                    sum(found[part].us for part in of_bf16)
                    for found in (model.passes(gpu, shape, rows, by, rate, on) for on in (False, True))
                )
                yield row | {
                    "pass": name,
                    "us": us,
                    "us_apart": us_apart,
                    "tflops": flops / us / 1e6,
                    "tflops_apart": flops / us_apart / 1e6,
                    "bf16_tflops": flops / in_bf16 / 1e6,
                    "faster": in_bf16 / us,
                    "faster_apart": in_bf16 / us_apart,
                }


def roofline_rows(scope: Scope = scopes.ALL) -> Iterator[dict[str, Any]]:
    """One row per GPU with a recipe, shape, load and launch: FLOPs of products, bytes, limit time."""
    for gpu in scope.gpus:
        for recipe, shape, load, rows in layers(gpu.architecture, scope):
            for name, each in passes(shape, rows, recipe).items():
                flops = each.cost.flops if each.kernel else 0
                limit = limit_ms(flops, each.cost.bytes, SPEED * gpu.bf16_flops, gpu.bandwidth)
                yield {
                    "gpu": gpu.name,
                    "recipe": recipe,
                    "shape": shape.name,
                    "load": load,
                    "pass": name,
                    "flops": flops,
                    "bytes": each.cost.bytes,
                    "limit_ms": limit,
                }
