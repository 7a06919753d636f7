"""Launch passes (2) and (4), the grouped GEMM: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

from torch import Tensor

from ..launching import cost, launches
from ..launching.launcher import launch
from ..operands import descriptors
from ..operands.alignment import vectors_fit
from ..operands.expert_tensors import ExpertTensors
from ..routing.plan import Schedule
from ..tiles.configs import BY_DESCRIPTORS, cdiv, choose, consumers, dot_precision, num_programs, task_rows
from .dprobs import Dprobs
from .triton_kernel import _grouped_gemm_kernel


def grouped_gemm_(
    y_RN: Tensor,
    x_RK: Tensor,
    w_ENK: ExpertTensors,
    schedule: Schedule,
    *,
    bias_EN: ExpertTensors | None = None,
    scale_R: Tensor | None = None,
    dprobs: Dprobs | None = None,
) -> None:
    """Writes all of `y`, zeros at padding rows, and `dprobs`. `x` and `y` have unit column stride."""
    N, K, num_experts = y_RN.shape[1], x_RK.shape[1], schedule.num_experts
    if y_RN.numel() == 0:
        return
    w_view = descriptors.matrices(w_ENK, num_experts, (N, K))
    use_tma = w_view is not None and descriptors.fits_tensor(x_RK) and descriptors.fits_tensor(y_RN)
    path, tile = choose(
        "gemm",
        x_RK.dtype,
        x_RK.device,
        use_tma,
        lambda: vectors_fit((x_RK, y_RN), [w_ENK], (N, K)),
        schedule.rows_per_expert,
    )
    k_contiguous = w_ENK.strides[1] == 1
    x_desc = w_desc = y_desc = None
    if path in BY_DESCRIPTORS and w_view is not None:
        block_m = task_rows(path, tile, x_RK.device)
        x_desc = descriptors.ragged_rows(x_RK, block_m, tile.BLOCK_K)
        w_desc = descriptors.of_matrices(w_view, tile.BLOCK_N, tile.BLOCK_K, k_contiguous)
        y_desc = descriptors.ragged_rows(y_RN, block_m, tile.BLOCK_N // tile.SUBTILES)
    bias, scale = bias_EN is not None, launches.size_of(scale_R)
    launches.report(path, lambda: cost.gemm(schedule.rows(), N, K, x_RK.element_size(), bias=bias, scale=scale))
    grid = (num_programs(tile, x_RK.device, schedule.max_tiles(tile.BLOCK_M) * cdiv(N, tile.BLOCK_N)),)
    bias_ptrs = (bias_EN.base, bias_EN.table) if bias_EN else (None, None)
    sums = dprobs or (None, None, None)
    num_partials, stride_bias_e = dprobs.partial.shape[0] if dprobs else 0, bias_EN.stride_e if bias_EN else 0
    reversed_ = w_ENK.stride_e < 0
    if path == "specialised":
        from .gluon_kernel import grouped_gemm_specialised_kernel

        launch(
            grouped_gemm_specialised_kernel,
            grid,
            *(x_desc, w_desc, *bias_ptrs, scale_R, y_RN, y_desc, *sums, schedule.tiles(tile.BLOCK_M)),
            *(num_partials, schedule.num_rows, num_experts, N, K, stride_bias_e, y_RN.stride(0)),
            *(k_contiguous, reversed_, consumers(x_RK.device), tile),
            num_warps=tile.num_warps,
        )
        return
    launch(
        _grouped_gemm_kernel,
        grid,
        x_RK,
        x_desc,
        w_ENK.base,
        w_desc,
        w_ENK.table,
        *bias_ptrs,
        scale_R,
        y_RN,
        y_desc,
        *sums,
        schedule.tiles(tile.BLOCK_M),
        num_partials,
        schedule.num_rows,
        num_experts,
        N,
        K,
        x_RK.stride(0),
        w_ENK.stride_e,
        *w_ENK.strides,
        stride_bias_e,
        y_RN.stride(0),
        k_contiguous,
        reversed_,
        w_ENK.aligned,
        tile,
        dot_precision(x_RK.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
