"""FLOPs of the operators for `torch.utils.flop_counter.FlopCounterMode`: matrix products alone, as PyTorch counts.

The formulas see shapes alone, so padding rows count as other rows do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from fusedmlp.kernels.launching.cost import product_flops
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments

Shape = Sequence[int]


def _product(num_rows: int, weights: Sequence[Shape]) -> int:
    """FLOPs of `num_rows` rows times weights of `[E, N, K]` or E of `[N, K]`; 0 without weights."""
    return product_flops(num_rows, *weights[0][-2:]) if weights else 0


def _grouped_gemm(x: Shape, w: Sequence[Shape], *_: Any, **__: Any) -> int:
    return _product(x[0], w)


def _grouped_wgrad(
    dw: Sequence[Shape], db: Sequence[Shape], dy: Sequence[Shape], x: Sequence[Shape], *rest: Any, **_: Any
) -> int:
    _, dy_row_ids, x_row_ids, _, _, _ = rest
    return sum(_product(shape[0], dw) for shape in dy_row_ids or x_row_ids or dy)


def _grouped_mlp(*args: Any, **_: Any) -> int:
    shapes: Any = MLPArguments(*args)
    num_rows = (shapes.x if shapes.row_ids is None else shapes.row_ids)[0]
    products = (shapes.fc1, shapes.fc2, *([w] for lora in (shapes.lora1, shapes.lora2) for w in lora or ()))
    return sum(_product(num_rows, weights) for weights in products)


def _grouped_mlp_backward(*args: Any, **_: Any) -> int:
    shapes: Any = MLPBackwardArguments(*args)
    products = [shapes.fc2, shapes.dw1, shapes.dw2] + [shapes.fc1] * shapes.need_dx
    lora1, lora2 = shapes.lora1 or (), shapes.lora2 or ()
    products += [[w] for w in (*shapes.dlora1, *shapes.dlora2, *lora2, *lora1[1 - shapes.need_dx :])]
    return sum(_product(shapes.h[0], weights) for weights in products)


_FORMULAS: dict[str, Callable[..., int]] = {
    "grouped_gemm": _grouped_gemm,
    "grouped_wgrad_": _grouped_wgrad,
    "grouped_mlp": _grouped_mlp,
    "grouped_mlp_backward_": _grouped_mlp_backward,
}


def register() -> None:
    """Register the formulas with PyTorch; the operators must be registered already."""
    for name, formula in _FORMULAS.items():
        register_flop_formula(getattr(torch.ops.fusedmlp, name))(formula)
