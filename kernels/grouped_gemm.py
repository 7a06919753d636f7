"""Passes (2) and (4): `y[r, n] = sum_k x[r, k] w[e, n, k] + scale[r] bias[e, n]` for the expert e of row r.

`dx = dh @ fc1` is the same with the weight's last two strides swapped. M-ragged over `tiles` (`schedule.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import dot, expert_base, load_tile, round_to
from .configs import dot_precision, select
from .expert_tensors import ExpertTensors
from .schedule import tile_schedule


@triton.jit
def _grouped_gemm_kernel(
    x_ptr,
    w_ptr,
    w_table_ptr,
    bias_ptr,
    bias_table_ptr,
    scale_ptr,
    y_ptr,
    tiles_ptr,
    num_tiles,
    num_experts,
    N,
    K,
    stride_x_r,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    stride_bias_e,
    stride_y_r,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_n = tl.cdiv(N, BLOCK_N)
    expert, first, end = load_tile(tiles_ptr, num_tiles, tl.program_id(0) // num_n)
    if expert < 0:
        return
    owned = expert < num_experts  # padding rows get zeros
    expert = tl.minimum(expert, num_experts - 1)
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = ((tl.program_id(0) % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, n_mask = rows < end, n < N

    w = expert_base(w_ptr, w_table_ptr, stride_w_e, expert)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, tl.where(owned, K, 0), BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x_MK = tl.load(
            x_ptr + rows[:, None] * stride_x_r + k[None, :], mask=row_mask[:, None] & (k < K)[None, :], other=0.0
        )
        w_KN = tl.load(
            w + k[:, None] * stride_w_k + n[None, :] * stride_w_n, mask=(k < K)[:, None] & n_mask[None, :], other=0.0
        )
        acc = dot(x_MK, w_KN, acc, PRECISION)

    if bias_ptr is not None:
        bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
        bias_1N = tl.load(bias + n, mask=n_mask & owned, other=0.0).to(tl.float32)[None, :]
        if scale_ptr is not None:
            bias_1N = bias_1N * tl.load(scale_ptr + rows, mask=row_mask & owned, other=0.0).to(tl.float32)[:, None]
        acc += bias_1N
    y = y_ptr + rows[:, None] * stride_y_r + n[None, :]
    tl.store(y, round_to(acc, y_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


def grouped_gemm_(
    y_RN: Tensor,
    x_RK: Tensor,
    w_ENK: ExpertTensors,
    offsets: Tensor,
    *,
    bias_EN: ExpertTensors | None = None,
    scale_R: Tensor | None = None,
) -> None:
    """Writes all of `y`, zeros at padding rows. `x` and `y` have unit column stride."""
    num_rows, N = y_RN.shape
    if y_RN.numel() == 0:
        return
    tile = select("gemm", x_RK.dtype, x_RK.device, "pointer", num_rows / (offsets.shape[0] - 1))
    tiles = tile_schedule(offsets, num_rows, tile.BLOCK_M)
    num_tiles = tiles.shape[1]
    _grouped_gemm_kernel[(num_tiles * triton.cdiv(N, tile.BLOCK_N),)](
        x_RK,
        w_ENK.base,
        w_ENK.table,
        bias_EN.base if bias_EN else None,
        bias_EN.table if bias_EN else None,
        scale_R,
        y_RN,
        tiles,
        num_tiles,
        offsets.shape[0] - 1,
        N,
        x_RK.shape[1],
        x_RK.stride(0),
        w_ENK.stride_e,
        *w_ENK.strides,
        bias_EN.stride_e if bias_EN else 0,
        y_RN.stride(0),
        tile.BLOCK_M,
        tile.BLOCK_N,
        tile.BLOCK_K,
        dot_precision(x_RK.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
