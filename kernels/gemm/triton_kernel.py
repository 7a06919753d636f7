"""Passes (2) and (4): `y[r, n] = sum_k x[r, k] w[e, n, k] + scale[r] bias[e, n]` for the expert e of row r.

`dx = dh @ fc1` is the same with the weight's last two strides swapped. M-ragged over the tiles of a plan. With
`dprobs`, the launch also adds up the partial sums that pass (3) left, so that they need no launch of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.product import product
from ..device.tile_order import load_tile, tile_at, zero_padding
from ..device.tiles import column_subtiles, expert_base, load_bias, store_rows, zeros
from .dprobs import sum_partials
from .epilogue import add_bias


@triton.jit
def store_tile(acc, bias, y, tile, row_M1, mask_M1, n, N, SUBTILES: tl.constexpr):
    """Store a finished tile in `y`, at its rows where `mask_M1` and at columns from `n` on, with the bias, in column
    subtiles.

    `bias`: `(pointer, table, expert stride, scale pointer)`; `y`: `(pointer, descriptor, row stride)`; `tile`:
    `(expert, first row, rows)`.
    """
    bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr = bias
    y_ptr, y_desc, stride_y_r = y
    expert, first, rows = tile
    WIDTH: tl.constexpr = acc.shape[1] // SUBTILES
    y_M1 = y_ptr + (first + row_M1).to(tl.int64) * stride_y_r
    subtiles = column_subtiles(acc, SUBTILES)
    for s in tl.static_range(SUBTILES):
        column = n + s * WIDTH
        bias_1N, scale_M1 = None, None
        if bias_ptr is not None:
            base = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
            bias_1N = load_bias(base, (column + tl.arange(0, WIDTH))[None, :], N)
            if scale_ptr is not None:
                scale_M1 = tl.load(scale_ptr + first + row_M1, mask=mask_M1, other=0.0).to(tl.float32)
        y_MN = add_bias(subtiles[s], bias_1N, scale_M1, y_ptr.dtype.element_ty)
        store_rows(y_desc, y_M1, first, rows, mask_M1, column, N, y_MN)


@triton.jit(do_not_specialize=["num_partials", "num_rows"])
def _grouped_gemm_kernel(
    x_ptr,
    x_desc,
    row_ids_ptr,
    w_ptr,
    w_desc,
    w_table_ptr,
    t_ptr,
    t_desc,
    b_ptr,
    b_desc,
    bias_ptr,
    bias_table_ptr,
    scale_ptr,
    y_ptr,
    y_desc,
    partial_ptr,
    dprobs_rows_ptr,
    dprobs_ptr,
    tiles_ptr,
    num_partials,
    num_rows,
    num_experts,
    N,
    K,
    rank,
    stride_x_r,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    stride_b_e,
    stride_b_n,
    stride_b_k,
    stride_bias_e,
    stride_y_r,
    K_CONTIGUOUS: tl.constexpr,
    REVERSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`x` `[R, K]`; `w` `[E, N, K]`; `bias` `[E, N]`; `scale` `[R]`; `y` `[R, N]`; tables: experts' addresses, `[E]`
    int64; `partial` `[num_partials, R]` fp32, `dprobs_rows` and `dprobs` `[R]`, as in `sum_partials`.

    `tiles`: a plan's table of tiles. Descriptors (`x_desc`, ...) move the same tensors by TMA. Absent ones are None.
    """
    SUBTILES: tl.constexpr = TILE.SUBTILES
    FLATTEN: tl.constexpr = TILE.PER_SM > 0
    num_m, num_n = tl.load(tiles_ptr), tl.cdiv(N, TILE.BLOCK_N)
    tl.assume(K > 0)
    WIDTH: tl.constexpr = TILE.BLOCK_N // SUBTILES
    row_M1 = tl.arange(0, TILE.BLOCK_M)[:, None]
    x = (x_ptr, x_desc, row_ids_ptr, stride_x_r)
    w = (w_ptr, w_desc, w_table_ptr, num_experts, stride_w_e, stride_w_n, stride_w_k)
    t, b = (t_ptr, t_desc, None, rank), (b_ptr, b_desc, None, num_experts, stride_b_e, stride_b_n, stride_b_k)
    bias, y = (bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr), (y_ptr, y_desc, stride_y_r)
    # Persistent. With FLATTEN this is one loop with that over K: a tile's first loads run under the last one's stores.
    for tile_index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        n, mask_M1 = n_tile * TILE.BLOCK_N, row_M1 < tile[2]
        acc = zeros(TILE.BLOCK_M, TILE.BLOCK_N, num_m, FLATTEN)
        acc = product(acc, x, w, tile, n, N, K, K_CONTIGUOUS, REVERSED, ALIGNED, TILE.BLOCK_K, PRECISION)
        if t_ptr is not None:
            acc = product(acc, t, b, tile, n, N, rank, K_CONTIGUOUS, False, True, TILE.BLOCK_K, PRECISION)
        store_tile(acc, bias, y, tile, row_M1, mask_M1, n, N, SUBTILES)

    zero_padding(y_ptr, tiles_ptr, N, stride_y_r, 1, TILE.BLOCK_M, WIDTH)
    if partial_ptr is not None:
        sum_partials(partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows, tl.arange(0, 256))
