"""Passes (2) and (4): `y[r, n] = sum_k x[r, k] w[e, n, k] + scale[r] bias[e, n]` for the expert e of row r.

`dx = dh @ fc1` is the same with the weight's last two strides swapped. M-ragged over the tiles of a plan. With
`dprobs`, the launch also adds up what pass (3) left of those, so that they need none of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device.tile_order import load_tile, tile_at, zero_padding
from ..device.tiles import (
    column_subtiles,
    dot,
    expert_base,
    load_bias,
    load_rows,
    load_weight,
    round_to,
    store_rows,
    zeros,
)
from ..launching import cost, launches
from ..launching.launcher import launch
from ..operands import descriptors
from ..operands.alignment import vectors_fit
from ..operands.expert_tensors import ExpertTensors
from ..routing.plan import Schedule
from ..tiles.configs import BY_DESCRIPTORS, cdiv, choose, consumers, dot_precision, num_programs, task_rows
from .dprobs import Dprobs, sum_partials


@triton.jit(do_not_specialize=["num_partials", "num_rows"])
def _grouped_gemm_kernel(
    x_ptr,
    x_desc,
    w_ptr,
    w_desc,
    w_table_ptr,
    bias_ptr,
    bias_table_ptr,
    scale_ptr,
    y_ptr,
    y_desc,
    partial_ptr,
    rows_ptr,
    dprobs_ptr,
    tiles_ptr,
    num_partials,
    num_rows,
    num_experts,
    N,
    K,
    stride_x_r,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    stride_bias_e,
    stride_y_r,
    K_CONTIGUOUS: tl.constexpr,
    REVERSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_m, num_n = tl.load(tiles_ptr), tl.cdiv(N, BLOCK_N)
    tl.assume(K > 0)
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    row_M1 = tl.arange(0, BLOCK_M)[:, None]
    # Persistent, and one loop with that over K if compiled so: a tile's first loads run under the last tile's stores.
    for place in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m_tile, n_tile = tile_at(place, num_m, num_n, GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        n, mask_M1 = n_tile * BLOCK_N, row_M1 < rows
        x_M1 = x_ptr + (first + row_M1).to(tl.int64) * stride_x_r
        w = expert_base(w_ptr, w_table_ptr, stride_w_e, expert, ALIGNED)
        w_e = num_experts - 1 - expert if REVERSED else expert

        acc = zeros(BLOCK_M, BLOCK_N, num_m, FLATTEN)
        for k in range(0, K, BLOCK_K):
            x_MK = load_rows(x_desc, x_M1, first, rows, mask_M1, k, K, BLOCK_K)
            w_KN = load_weight(w_desc, w, w_e, n, k, N, K, stride_w_n, stride_w_k, BLOCK_N, BLOCK_K, K_CONTIGUOUS)
            acc = dot(x_MK, w_KN, acc, PRECISION)

        y_M1 = y_ptr + (first + row_M1).to(tl.int64) * stride_y_r
        parts = column_subtiles(acc, SUBTILES)
        for s in tl.static_range(SUBTILES):
            y_MN = parts[s]
            column = n + s * WIDTH
            if bias_ptr is not None:
                bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
                bias_1N = load_bias(bias, column, N, WIDTH)
                if scale_ptr is not None:
                    bias_1N = bias_1N * tl.load(scale_ptr + first + row_M1, mask=mask_M1, other=0.0).to(tl.float32)
                y_MN += bias_1N
            y_MN = round_to(y_MN, y_ptr.dtype.element_ty)
            store_rows(y_desc, y_M1, first, rows, mask_M1, column, N, y_MN)

    zero_padding(y_ptr, tiles_ptr, N, stride_y_r, 1, BLOCK_M, WIDTH)
    if partial_ptr is not None:
        sum_partials(partial_ptr, rows_ptr, dprobs_ptr, num_partials, num_rows)


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
    blocks = tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K, tile.SUBTILES, tile.GROUP_M
    reversed_ = w_ENK.stride_e < 0
    if path == "specialised":
        from .gluon_kernel import grouped_gemm_specialised_kernel

        launch(
            grouped_gemm_specialised_kernel,
            grid,
            *(x_desc, w_desc, *bias_ptrs, scale_R, y_RN, y_desc, *sums, schedule.tiles(tile.BLOCK_M)),
            *(num_partials, schedule.num_rows, num_experts, N, K, stride_bias_e, y_RN.stride(0)),
            *(k_contiguous, reversed_, consumers(x_RK.device), *blocks, tile.num_stages),
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
        *blocks,
        tile.PER_SM > 0,
        dot_precision(x_RK.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
