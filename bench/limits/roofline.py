"""FLOPs, least bytes and limit times of every pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.limits import scope as scopes
from bench.limits.gpus import limit_ms
from bench.limits.scope import Scope
from bench.limits.shapes import Shape
from fusedmlp.kernels.launching import cost
from fusedmlp.kernels.launching.cost import Cost

_BF16, _FP32, _INT64 = 2, 4, 8  # bytes


def passes(shape: Shape, rows: list[int], itemsize: int = _BF16) -> dict[str, Cost]:
    """Every pass of a gated layer with routing probabilities and fp32 main_grad; letters as in `functional.py`.

    Where the shape says how many tokens there are, also what `moe_experts` runs: passes that gather rows from them,
    routing, and combining, once in forward and once in backward.
    """
    H, F, G = shape.H, shape.F, 2 * shape.F
    costs = {
        "fc1_act": cost.fc1_act(rows, H, F, itemsize),
        "fc2": cost.gemm(rows, H, F, itemsize),
        "dgrad_act": cost.dgrad_act(rows, H, F, itemsize),
        "dx": cost.gemm(rows, H, G, itemsize),
    }
    for suffix, accumulate in (("", True), (", overwrite", False)):
        costs |= {
            f"wgrad fc2{suffix}": cost.wgrad(rows, H, F, itemsize, _FP32, accumulate=accumulate),
            f"wgrad fc1{suffix}": cost.wgrad(rows, G, H, itemsize, _FP32, accumulate=accumulate),
        }
    if (top_k := shape.R // shape.most) > 1:
        T = shape.most
        costs |= {
            "order_rows": cost.order_rows(shape.R, shape.E, _INT64, _FP32),
            "fc1_act, gathered": cost.fc1_act(rows, H, F, itemsize, tokens=T),
            "dgrad_act, gathered": cost.dgrad_act(rows, H, F, itemsize, tokens=T),
            "wgrad fc2, gathered": cost.wgrad(rows, H, F, itemsize, _FP32, accumulate=True, dy_tokens=T),
            "wgrad fc1, gathered": cost.wgrad(rows, G, H, itemsize, _FP32, accumulate=True, x_tokens=T),
            "combine": cost.combine(T, top_k, H, itemsize),
        }
    return costs


# Passes of one training step in the order of their launches; the limit of a step is the sum of its passes' limits.
FORWARD = ("fc1_act", "fc2")
BACKWARD = ("dgrad_act", "dx", "wgrad fc2", "wgrad fc1")


def rows(scope: Scope = scopes.ALL) -> Iterator[dict[str, Any]]:
    """One row per shape, load and pass; limits in ms by GPU."""
    for shape in scope.shapes:
        for load, count in scope.loads.items():
            for name, each in passes(shape, count(shape)).items():
                yield {
                    "shape": shape.name,
                    "load": load,
                    "pass": name,
                    "flops": each.flops,
                    "bytes": each.bytes,
                    "limit_ms": {
                        gpu.name: limit_ms(each.flops, each.bytes, gpu.bf16_flops, gpu.bandwidth) for gpu in scope.gpus
                    },
                }
