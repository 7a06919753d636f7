"""Time of a layer of tokens by the model: routing, gathers, combine and launches beside the passes.

The passes are the warp-specialized kernels as `model` has them, on sorted rows. Rows are gathered in their loads, whose
bytes count; the addresses and the instructions of such loads are not modelled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bench.limits import balance, model
from bench.limits.gpus import GPU
from bench.limits.rates import Rates
from bench.limits.roofline import BACKWARD, FORWARD
from bench.limits.shapes import Shape
from bench.proof.main_loop import MainLoop
from fusedmlp.kernels.launching import cost

LAUNCH_US = 2.0  # estimate: from the end of one kernel until the next has blocks on every multiprocessor
_BF16, _FP32, _INT64 = 2, 4, 8  # bytes


class Design(NamedTuple):
    """Gradients and epilogues, by which this library's layer differs from another."""

    grad: int  # bytes of a weight gradient's element
    accumulate: bool  # wgrad adds to what is there
    hidden: bool = False  # every epilogue runs under the next tile's products, whatever registers that takes


OURS = Design(_FP32, True)
WRITES = Design(_BF16, False)  # as SonicMoE's wgrad, to whose gradient PyTorch then adds
HIDDEN = WRITES._replace(hidden=True)


class Layer(NamedTuple):
    """Times in us."""

    forward: float
    backward: float
    backward_gemms: float  # its passes on sorted rows alone


def times(gpu: GPU, shape: Shape, rows: list[int], by: dict[str, MainLoop], rate: Rates, design: Design) -> Layer:
    """Time of a layer of warp-specialized kernels; `by`: facts of the GPU's kernels."""
    gathered, in_order = (_least(each, rows, design) for each in (shape, replace(shape, most=shape.R)))
    layer, gemms = {}, {}
    for name, (kernel, N, K) in balance.passes(shape).items():
        tile = balance.tile_of(kernel, rows, gpu.architecture, warp_specialized=True)
        variant = kernel + model.WARP_SPECIALIZED
        about = model.kernel_of(variant, by[variant], tile)
        if kernel == "wgrad":
            about = about._replace(stored=design.grad)
        if design.hidden:
            about = about._replace(loop=about.loop._replace(joined=2))
        of_tile, steps = model.tile_cost(about, rate), model.tile_steps(kernel, tile, rows, N, K)
        persistent = kernel != "wgrad" or balance.dealt_out(kernel, rows, N, K, gpu, warp_specialized=True)
        taken = model.cycles(of_tile, steps, gpu.processors, rate.launch, about.programs, persistent=persistent)
        compute = 1e6 * model.seconds(taken, gathered[name].flops, gpu.processors, rate)
        layer[name], gemms[name] = (max(compute, _memory_us(each[name], gpu, rate)) for each in (gathered, in_order))
    combine, ordering = (_memory_us(gathered[name], gpu, rate) + LAUNCH_US for name in ("combine", "order_rows"))
    forward, backward = (sum(layer[name] + LAUNCH_US for name in names) for names in (FORWARD, BACKWARD))
    return Layer(ordering + forward + combine, backward + combine, sum(gemms[name] for name in BACKWARD))


def _least(shape: Shape, rows: list[int], design: Design) -> dict[str, cost.Cost]:
    """Costs of the passes, of which those that can gather rows do, and of routing and combining."""
    H, F, G, T = shape.H, shape.F, 2 * shape.F, shape.most
    tokens = None if T == shape.R else T
    grad, accumulate, _ = design
    return {
        "order_rows": cost.order_rows(shape.R, shape.E, _INT64, _FP32),
        "fc1_act": cost.fc1_act(rows, H, F, _BF16, tokens=tokens),
        "fc2": cost.gemm(rows, H, F, _BF16),
        "dgrad_act": cost.dgrad_act(rows, H, F, _BF16, tokens=tokens),
        "dx": cost.gemm(rows, H, G, _BF16),
        "wgrad fc2": cost.wgrad(rows, H, F, _BF16, grad, accumulate=accumulate, dy_tokens=tokens),
        "wgrad fc1": cost.wgrad(rows, G, H, _BF16, grad, accumulate=accumulate, x_tokens=tokens),
        "combine": cost.combine(T, shape.R // T, H, _BF16),
    }


def _memory_us(least: cost.Cost, gpu: GPU, rate: Rates) -> float:
    return 1e6 * least.bytes / (gpu.bandwidth * rate.memory)


def add_us(shape: Shape, gpu: GPU) -> float:
    """Time of `main_grad.add_(grad)` for all weights: 2 bytes a weight read, and 4 read and written, at full speed."""
    return 1e6 * 10 * 3 * shape.E * shape.H * shape.F / gpu.bandwidth


def flops(shape: Shape, direction: str) -> float:
    """FLOPs of the layer's products, forward or backward."""
    return (6 if direction == "forward" else 12) * shape.R * shape.H * shape.F
