"""Launch the quantization of weights to 8 bits: see `weights_kernel.py`."""

from __future__ import annotations

from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands import expert_tensors
from ..operands.expert_tensors import ExpertTensors
from ..operands.quantized import CHUNK, Quantized
from ..tiles.rounding import cdiv
from ..tiles.table import Recipe
from .weights_kernel import _quantize_weights_kernel

# Columns of a program, one chunk or half of one, and warps.
_SIZES: dict[Recipe, tuple[int, int]] = {"fp8_block": (128, 8), "mxfp8": (64, 4)}


@Launcher
def grouped_quantize_weights_(
    builder: Builder, by_in: Quantized | None, by_out: Quantized | None, w_ENK: ExpertTensors, recipe: Recipe
) -> None:
    """Writes all of one copy of weights `[E, N, K]` or both, as `operands/quantized.py` describes them: `by_in` `[E, N,
    K]`, for products over in features (K), and `by_out` `[E, K, N]`, for products over out features.

    Weights of fp32 are rounded to bf16 first, as layers compute with them.
    """
    if by_in is not None:
        num_experts, N, K = by_in.elements.shape
    elif by_out is not None:
        num_experts, K, N = by_out.elements.shape
    else:
        return
    if not num_experts * N * K:
        return
    costs = cost.quantize_weights(
        num_experts,
        N,
        K,
        w_ENK.base.dtype.itemsize,
        recipe,
        by_in=by_in is not None,
        by_out=by_out is not None,
    )
    # Neighbouring columns are read together. Each copy of weights is the other one of the transposed weights.
    w, row_copy, column_copy, R, C = w_ENK, by_in, by_out, N, K
    if w.strides[1] > w.strides[0]:
        w, row_copy, column_copy, R, C = w.T, by_out, by_in, K, N
    columns, num_warps = _SIZES[recipe]
    arguments = {
        **expert_tensors.weight_arguments(w, "r", "c"),
        "row_copy_ptr": row_copy and row_copy.elements,
        "row_scales_ptr": row_copy and row_copy.scales,
        "column_copy_ptr": column_copy and column_copy.elements,
        "column_scales_ptr": column_copy and column_copy.scales,
        "R": R,
        "C": C,
        "RECIPE": recipe,
        "BLOCK_C": columns,
    }
    grid = (num_experts * cdiv(R, CHUNK) * cdiv(C, CHUNK) * (CHUNK // columns),)
    builder.launch(_quantize_weights_kernel, grid, arguments, cost=costs, num_warps=num_warps)
