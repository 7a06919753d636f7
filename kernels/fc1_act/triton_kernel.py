"""Pass (1): `h = x @ fc1^T + bias1` and `a = act(h) * probs`, for the rows of every expert.

One program computes both channels of an output column: `h` has `G = 2F` columns, gate `f` and linear `F + f` (halves of
a row), or interleaved, gate `2f` and linear `2f + 1`. Both are columns of one accumulator, twice as wide as `a`'s tile:
with two accumulators, zeroed where `flatten` joins the loops, ptxas waits after every wgmma. The activation is computed
from `h` as stored, so that backward, which recomputes it from `h`, sees the same values.

With row ids, row r of the result is computed from row `row_ids[r]` of `x`: tokens need not be permuted before. x is
then loaded by pointers, through cp.async, also where all else goes by TMA, which gathers rows on Blackwell alone (there
see `fc1_act/gluon_kernel.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import activation
from ..device.product import product
from ..device.tile_order import load_tile, tile_at, zero_padding
from ..device.tiles import column_subtiles, expert_base, round_to, store_halves, store_rows, zeros
from .epilogue import activate, pre_activation


@triton.jit
def _grouped_fc1_act_kernel(
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
    probs_ptr,
    h_ptr,
    h_desc,
    a_ptr,
    a_desc,
    tiles_ptr,
    num_experts,
    H,
    F,
    rank,
    stride_x_r,
    stride_w_e,
    stride_w_g,
    stride_w_h,
    stride_b_e,
    stride_b_n,
    stride_b_k,
    stride_bias_e,
    stride_h_r,
    stride_a_r,
    ACT: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    REVERSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`x` `[R, H]`, or `[T, H]` with `row_ids` `[R]`; `w` `[E, G, H]`; `bias` `[E, G]`; `probs` `[R]`; `h` `[R, G]`;
    `a` `[R, F]`; tables: experts' addresses, `[E]` int64. `row_ids[r]` is the row of `x` that row r takes.

    `tiles`: a plan's table of tiles. Descriptors (`x_desc`, ...) move the same tensors by TMA. Absent ones are None.
    """
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    SUBTILES: tl.constexpr = TILE.SUBTILES
    FLATTEN: tl.constexpr = TILE.PER_SM > 0
    HALVES: tl.constexpr = activation.halves(ACT)
    STEP: tl.constexpr = ACT.CHANNEL_STEP
    WIDTH: tl.constexpr = TILE.BLOCK_N // SUBTILES
    tl.assume(H > 0)
    num_m, num_f = tl.load(tiles_ptr), tl.cdiv(F, TILE.BLOCK_N)
    end_g = F * STEP  # end of the gates; a tile of weights may run past it, into columns that are not stored
    row_M1 = tl.arange(0, BLOCK_M)[:, None]
    x = (x_ptr, x_desc, row_ids_ptr, stride_x_r)
    w = (w_ptr, w_desc, w_table_ptr, num_experts, stride_w_e, stride_w_g, stride_w_h)
    t, b = (t_ptr, t_desc, None, rank), (b_ptr, b_desc, None, num_experts, stride_b_e, stride_b_n, stride_b_k)
    for tile_index in tl.range(tl.program_id(0), num_m * num_f, tl.num_programs(0), flatten=FLATTEN):
        m_tile, f_tile = tile_at(tile_index, num_m, num_f, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        expert, first, num_rows = tile
        f, mask_M1 = f_tile * TILE.BLOCK_N, row_M1 < num_rows
        acc = zeros(BLOCK_M, HALVES * TILE.BLOCK_N * STEP, num_m, FLATTEN)
        acc = product(
            *(acc, x, w, tile, f, end_g, H, K_CONTIGUOUS, REVERSED, ALIGNED, TILE.BLOCK_K, PRECISION, HALVES, STEP)
        )
        if t_ptr is not None:
            acc = product(
                *(acc, t, b, tile, f, end_g, rank, K_CONTIGUOUS, False, True, TILE.BLOCK_K, PRECISION, HALVES, STEP)
            )
        h_M1 = h_ptr + (first + row_M1).to(tl.int64) * stride_h_r
        a_M1 = a_ptr + (first + row_M1).to(tl.int64) * stride_a_r
        if probs_ptr is not None:
            probs_M1 = tl.load(probs_ptr + first + row_M1, mask=mask_M1, other=0.0).to(tl.float32)
        bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert) if bias_ptr is not None else None
        subtiles = column_subtiles(acc, HALVES * SUBTILES)
        for s in tl.static_range(SUBTILES):
            column = f + s * WIDTH
            column_1G = (column * STEP + tl.arange(0, WIDTH * STEP))[None, :]
            l_MF = subtiles[(HALVES - 1) * SUBTILES + s]
            h_MG, l_MF = pre_activation(subtiles[s], l_MF, bias, column_1G, end_g, ACT, h_ptr.dtype.element_ty)
            if HALVES == 2:
                store_halves(h_desc, h_M1, first, num_rows, mask_M1, column, F, h_MG, l_MF)
            else:
                store_rows(h_desc, h_M1, first, num_rows, mask_M1, column * STEP, end_g, h_MG)
            a = activate(h_MG, l_MF, ACT)
            if probs_ptr is not None:
                a *= probs_M1
            a = round_to(a, a_ptr.dtype.element_ty)
            store_rows(a_desc, a_M1, first, num_rows, mask_M1, column, F, a)

    # act(0) = 0 for every activation.
    zero_padding(h_ptr, tiles_ptr, 2 * F if ACT.GATED else F, stride_h_r, 1, BLOCK_M, WIDTH)
    zero_padding(a_ptr, tiles_ptr, F, stride_a_r, 1, BLOCK_M, WIDTH)
