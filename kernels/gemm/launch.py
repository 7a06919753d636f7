"""Launch passes (2) and (4), the grouped GEMM: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands import adapter as adapters
from ..operands import descriptors, expert_tensors
from ..operands.adapter import Adapter
from ..operands.alignment import vectors_fit
from ..operands.arrays import Array, itemsize
from ..operands.expert_tensors import ExpertTensors
from ..operands.quantized import Quantized
from ..routing.plan import Schedule
from ..tiles.rounding import cdiv
from ..tiles.select import choose, eight_bit
from ..tiles.table import BY_DESCRIPTORS, Recipe, Tile, small
from ..warp_specialized import gluon_missing, refusal
from .dprobs import Dprobs, sum_partials_kernel
from .triton_kernel import _grouped_gemm_kernel


@Launcher
def grouped_gemm_(
    builder: Builder,
    y_RN: Array,
    x_RK: Array,
    w_ENK: ExpertTensors,
    schedule: Schedule,
    *,
    bias_EN: ExpertTensors | None = None,
    scale_R: Array | None = None,
    dprobs: Dprobs | None = None,
    adapter: Adapter | None = None,
    row_ids_R: Array | None = None,
) -> None:
    """Writes all of `y`, zeros at padding rows, and `dprobs`. `x` and `y` have unit column stride.

    `adapter`: adds `t @ b^T`. `row_ids` (`[R]` int32 or int64, read for owned rows only) makes `x` `[T, K]`: row r
    takes `x[row_ids[r]]`; only with few columns of `y`, of an adapter's `A x`.
    """
    target, dtype, gathered = builder.target, x_RK.dtype, row_ids_R is not None
    (num_rows, N), K = y_RN.shape, x_RK.shape[1]
    if not num_rows * N:
        return
    w_view, k_contiguous = descriptors.matrices(w_ENK, (N, K)), w_ENK.strides[1] == 1
    fits = w_view is not None and descriptors.fits(x_RK) and descriptors.fits(y_RN)
    fits = fits and adapters.fits(adapter, k_contiguous)
    vectors = vectors_fit((x_RK, y_RN), [w_ENK], (N, K))
    refused, regime = refusal(target, described=fits), small(N, K)
    chosen = choose("gemm", dtype, target, fits, vectors, schedule.rows_per_expert, gathered, refused, regime)
    path, tile = chosen.path, chosen.tile
    x_desc = w_desc = y_desc = None
    if path in BY_DESCRIPTORS and w_view is not None:
        block_m = target.consumer_rows(path, tile)
        x_desc = None if gathered else descriptors.ragged_rows(x_RK, block_m, tile.BLOCK_K)
        w_desc = descriptors.of_matrices(w_view, tile.BLOCK_N, tile.BLOCK_K, k_contiguous)
        y_desc = descriptors.ragged_rows(y_RN, block_m, tile.BLOCK_N // tile.SUBTILES)
    arguments = {
        "x_desc": x_desc,
        "w_desc": w_desc,
        "y_desc": y_desc,
        **_arguments(builder, y_RN, K, schedule, tile, bias_EN, scale_R, dprobs),
        "num_experts": schedule.num_experts,
        **adapters.arguments(adapter, path, tile, target.consumer_rows(path, tile), tile.BLOCK_N),
        "K_CONTIGUOUS": k_contiguous,
        "REVERSED": w_ENK.stride_e < 0,
    }
    grid = (target.num_programs(tile, schedule.max_tiles(tile.BLOCK_M) * cdiv(N, tile.BLOCK_N)),)
    bias, scale = bias_EN is not None, itemsize(scale_R)
    rank = adapter.rank if adapter else 0
    costs = partial(cost.gemm, N=N, K=K + rank, itemsize=dtype.itemsize, bias=bias, scale=scale)
    if path == "warp_specialized":
        from .gluon_kernel import grouped_gemm_warp_specialized_kernel

        arguments = adapters.warp_specialized(arguments) | {"x_scales_desc": None, "w_scales": None}
        builder.launch(grouped_gemm_warp_specialized_kernel, grid, arguments, chosen, costs)
        return
    arguments |= {
        "x_ptr": x_RK,
        "row_ids_ptr": row_ids_R,
        **expert_tensors.weight_arguments(w_ENK, "n", "k"),
        "stride_x_r": x_RK.strides[0],
        "PRECISION": target.precision(dtype),
    }
    builder.launch(_grouped_gemm_kernel, grid, arguments, chosen, costs)


def _arguments(
    builder: Builder,
    y_RN: Array,
    K: int,
    schedule: Schedule,
    tile: Tile,
    bias_EN: ExpertTensors | None,
    scale_R: Array | None,
    dprobs: Dprobs | None,
) -> dict[str, Any]:
    """Arguments that all kernels take."""
    return {
        **expert_tensors.arguments("bias", bias_EN),
        "scale_ptr": scale_R,
        "y_ptr": y_RN,
        "partial_ptr": dprobs and dprobs.partial,
        "dprobs_rows_ptr": dprobs and dprobs.places,
        "dprobs_ptr": dprobs and dprobs.out,
        "tiles_ptr": schedule.tiles(builder, tile.BLOCK_M),
        "num_partials": dprobs.partial.shape[0] if dprobs else 0,
        "num_rows": y_RN.shape[0],
        "N": y_RN.shape[1],
        "K": K,
        "stride_y_r": y_RN.strides[0],
    }


@Launcher
def grouped_gemm_quantized_(
    builder: Builder,
    y_RN: Array,
    x_RK: Quantized,
    w_ENK: Quantized,
    schedule: Schedule,
    recipe: Recipe,
    *,
    bias_EN: ExpertTensors | None = None,
    scale_R: Array | None = None,
    dprobs: Dprobs | None = None,
) -> None:
    """`grouped_gemm_` of a row copy of `x` and of weights in 8 bits, both quantized for `recipe`; `y` has 16 bits.

    See `gluon_kernel.py` and `mxfp8_triton_kernel.py`.

    Raises:
        NotImplementedError: the target has no kernel for the recipe.
        ValueError: TMA cannot move the operands.
    """
    target, (num_rows, N), K = builder.target, y_RN.shape, x_RK.elements.shape[1]
    if not num_rows * N:
        return
    chosen = eight_bit("gemm", recipe, target, gluon_missing())
    tile = chosen.tile
    arguments = _arguments(builder, y_RN, K, schedule, tile, bias_EN, scale_R, dprobs)
    if chosen.path == "pointer":
        from .mxfp8_triton_kernel import _grouped_gemm_mxfp8_triton_kernel as kernel

        pointers = {"x_ptr": x_RK.elements, "x_scales_ptr": x_RK.scales}
        arguments |= {**pointers, "w_ptr": w_ENK.elements, "w_scales_ptr": w_ENK.scales}
    else:
        rows = target.consumer_rows(chosen.path, tile)
        arguments |= {**descriptors.eight_bit(x_RK, w_ENK, rows, tile), **adapters.NONE}
        arguments["y_desc"] = descriptors.ragged_rows(y_RN, rows, tile.BLOCK_N // tile.SUBTILES)
        from .gluon_kernel import grouped_gemm_warp_specialized_kernel as kernel

        descriptors.check_fit(arguments)
    grid = (target.num_programs(tile, schedule.max_tiles(tile.BLOCK_M) * cdiv(N, tile.BLOCK_N)),)
    bias = itemsize(bias_EN and bias_EN.base)
    costs = partial(
        cost.gemm_quantized, N=N, K=K, recipe=recipe, y=y_RN.dtype.itemsize, bias=bias, scale=itemsize(scale_R)
    )
    builder.launch(kernel, grid, arguments, chosen, costs)


def plan_dprobs(builder: Builder, dprobs: Dprobs) -> None:
    """Plan the sums of `dprobs` alone, where no launch of pass (4) makes them."""
    (num_partials, num_rows), block = dprobs.partial.shape, 256
    arguments = {
        "partial_ptr": dprobs.partial,
        "dprobs_rows_ptr": dprobs.places,
        "dprobs_ptr": dprobs.out,
        "num_partials": num_partials,
        "num_rows": num_rows,
        "BLOCK": block,
    }
    if num_rows:
        builder.launch(sum_partials_kernel, (cdiv(num_rows, block),), arguments, num_warps=4)
