"""Passes (2) and (4) of 8-bit operands (recipe mxfp8) by pointers, where `tl.dot_scaled` is `mma.sync` or MFMA: the
tiles of `triton_kernel.py`, in the same order, with the same epilogue.
"""

import triton
import triton.language as tl

from ..device.scaled_product import CHUNK, dot_scaled, load_scales
from ..device.tile_order import load_tile, tile_at, zero_padding
from ..device.tiles import load_rows, load_weight, zeros
from .dprobs import sum_partials
from .triton_kernel import store_tile


@triton.jit
def _product(acc, x, w, m_tile, n_tile, tile, N, K):
    """`acc + x @ w[expert, 128 * n_tile:, :]^T` in fp32, for the rows of a tile, `(expert, first row, rows)`."""
    x_ptr, x_scales_ptr = x
    w_ptr, w_scales_ptr = w
    expert, first, rows = tile
    num_steps, num_chunks = tl.cdiv(K, CHUNK), tl.cdiv(N, CHUNK)
    row_M1 = tl.arange(0, CHUNK)[:, None]
    x_M1 = x_ptr + (first + row_M1).to(tl.int64) * K
    w_ptr += expert.to(tl.int64) * N * K
    for step in range(0, num_steps):
        k = step * CHUNK
        x_MK = load_rows(None, x_M1, first, rows, row_M1 < rows, k, K, CHUNK)
        w_KN = load_weight(None, w_ptr, expert, n_tile * CHUNK, k, N, K, K, 1, CHUNK, CHUNK, True)
        x_scales = load_scales(x_scales_ptr, m_tile * num_steps + step)
        w_scales = load_scales(w_scales_ptr, (expert * num_steps + step) * num_chunks + n_tile)
        acc = dot_scaled(x_MK, x_scales, w_KN, w_scales, acc)
    return acc


@triton.jit(do_not_specialize=["num_partials", "num_rows"])
def _grouped_gemm_mxfp8_triton_kernel(
    x_ptr,
    x_scales_ptr,
    w_ptr,
    w_scales_ptr,
    bias_ptr,
    bias_table_ptr,
    scale_ptr,
    y_ptr,
    partial_ptr,
    dprobs_rows_ptr,
    dprobs_ptr,
    tiles_ptr,
    num_partials,
    num_rows,
    N,
    K,
    stride_bias_e,
    stride_y_r,
    TILE: tl.constexpr,
):
    """`x` `[R, K]` and `w` `[E, N, K]` e4m3; scales E8M0, `[tiles, ceil(K / 128), 512]` of `x` and `[E, ceil(K / 128),
    ceil(N / 128), 512]` of `w`; other arguments as in the kernel of 16 bits.
    """
    # Tiles and steps are the chunks that share 512 bytes of scales.
    tl.static_assert(TILE.BLOCK_M == CHUNK)
    tl.static_assert(TILE.BLOCK_N == CHUNK)
    tl.static_assert(TILE.BLOCK_K == CHUNK)
    num_m, num_n = tl.load(tiles_ptr), tl.cdiv(N, CHUNK)
    row_M1 = tl.arange(0, CHUNK)[:, None]
    bias, y = (bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr), (y_ptr, None, stride_y_r)
    for tile_index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        tile, acc = load_tile(tiles_ptr, m_tile), zeros(CHUNK, CHUNK, num_m, False)
        acc = _product(acc, (x_ptr, x_scales_ptr), (w_ptr, w_scales_ptr), m_tile, n_tile, tile, N, K)
        store_tile(acc, bias, y, tile, row_M1, row_M1 < tile[2], n_tile * CHUNK, N, TILE.SUBTILES)

    zero_padding(y_ptr, tiles_ptr, N, stride_y_r, 1, CHUNK, CHUNK // TILE.SUBTILES)
    if partial_ptr is not None:
        sum_partials(partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows, tl.arange(0, 256))
