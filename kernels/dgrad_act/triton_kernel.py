"""Pass (3): `da = dy @ fc2`, with the backward of `a = act(h) * p` in its epilogue (p: routing probability).

With `g`, `l` the gate and linear parts of `h`, recomputed from it:
    dh_g = p * da * d act / dg,    dh_l = p * da * d act / dl,    a = p * act
    dprobs[r] = sum_f da[r, f] * act[r, f] + dy[r] . bias2
(the last term because `y = p * (fc2 @ act + bias2)`). The sum over f is one fp32 partial sum per column tile, and
the last term one more; pass (4), or a launch of its own where there is no dx, adds them up (`gemm/dprobs.py`): no
atomics, the same bits every run.

With row ids, row r takes row `row_ids[r]` of `dy`: gradients of tokens need not be permuted before. dy is then loaded
by pointers, through cp.async, also where all else goes by TMA, which gathers rows on Blackwell alone (there see
`dgrad_act/gluon_kernel.py`).

The epilogue reads two tiles and writes three beside `da`, so it takes one column subtile after another; one store takes
both halves of `dh`. Addresses and masks of `h` start from the subtile, which leaves little to compute anew for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import activation
from ..device.product import product
from ..device.tile_order import load_tile, tile_at, zero_padding
from ..device.tiles import (
    column_subtiles,
    expert_base,
    load_bias,
    load_rows,
    round_to,
    store_halves,
    store_rows,
    to_fp32,
    zeros,
)
from .epilogue import backward


@triton.jit
def _load_h(h_M1, l_M1, mask_M1, left, WIDTH: tl.constexpr, ACT: tl.constexpr):
    """Load a subtile of gates at `h_M1` and one of linear channels at `l_M1`, where a row has `left` of each; or one of
    both where they are interleaved.
    """
    g = load_rows(None, h_M1, 0, 0, mask_M1, 0, left * ACT.CHANNEL_STEP, WIDTH * ACT.CHANNEL_STEP)
    l = g
    if activation.halves(ACT) == 2:
        l = load_rows(None, l_M1, 0, 0, mask_M1, 0, left, WIDTH)
    return g, l


@triton.jit
def _bias_dprobs(
    partial_ptr,
    dy_ptr,
    row_ids_ptr,
    bias_ptr,
    bias_table_ptr,
    tiles_ptr,
    H,
    stride_dy_r,
    stride_bias_e,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """`partial[r] = sum_h dy[r, h] bias[e, h]`; all programs of a launch share the work. Also launched by itself.

    `partial` `[R]` fp32, others as in `_grouped_dgrad_act_kernel`.
    """
    row_M1 = tl.arange(0, BLOCK_M)[:, None]
    for m_tile in range(tl.program_id(0), tl.load(tiles_ptr), tl.num_programs(0)):
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        mask_M1, dy_row_M1 = row_M1 < rows, first + row_M1
        if row_ids_ptr is not None:
            dy_row_M1 = tl.load(row_ids_ptr + dy_row_M1, mask=mask_M1, other=0)
        dy_M1 = dy_ptr + dy_row_M1.to(tl.int64) * stride_dy_r
        bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
        acc_MH = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
        for k in tl.range(0, H, BLOCK_H, num_stages=3):  # without a dot, loads are pipelined on demand only
            dy_MH = load_rows(None, dy_M1, first, rows, mask_M1, k, H, BLOCK_H)
            acc_MH += dy_MH.to(tl.float32) * load_bias(bias, (k + tl.arange(0, BLOCK_H))[None, :], H)
        tl.store(partial_ptr + first + row_M1, tl.sum(acc_MH, axis=1, keep_dims=True), mask=mask_M1)


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_dgrad_act_kernel(
    dy_ptr,
    dy_desc,
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
    dh_ptr,
    dh_desc,
    a_ptr,
    a_desc,
    partial_ptr,
    tiles_ptr,
    num_experts,
    num_rows,
    H,
    F,
    rank,
    stride_dy_r,
    stride_w_e,
    stride_w_f,
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
    """`dy` `[R, H]`, or `[T, H]` with `row_ids` `[R]`; `w` `[E, F, H]`; `bias` `[E, H]`; `probs` `[R]`; `h` and `dh`
    `[R, G]`; `a` `[R, F]`; `partial` `[column tiles and one for a bias, R]` fp32; tables: experts' addresses, `[E]`
    int64. `row_ids[r]` is the row of `dy` that row r takes.

    `tiles`: a plan's table of tiles. Descriptors (`dy_desc`, ...) move the same tensors by TMA. Absent ones are None.
    """
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    SUBTILES: tl.constexpr = TILE.SUBTILES
    HAS_BIAS: tl.constexpr = probs_ptr is not None and bias_ptr is not None
    FLATTEN: tl.constexpr = TILE.PER_SM > 0 and not (HAS_BIAS and row_ids_ptr is not None)  # would spill a few bytes
    WIDTH: tl.constexpr = TILE.BLOCK_N // SUBTILES
    STEP: tl.constexpr = ACT.CHANNEL_STEP
    WIDTH_G: tl.constexpr = WIDTH * STEP
    # With descriptors, rows and halves of rows are whole multiples of 16 bytes: loads by pointers are vectors, too.
    VECTOR: tl.constexpr = 1 if dh_desc is None else 128 // h_ptr.dtype.element_ty.primitive_bitwidth // STEP
    tl.assume(H > 0)
    num_m, num_f = tl.load(tiles_ptr), tl.cdiv(F, TILE.BLOCK_N)
    num_partials = num_f
    if HAS_BIAS:
        # In loops of its own: in the loop over H below, all column tiles would pay for this one sum.
        _bias_dprobs(
            partial_ptr + num_f.to(tl.int64) * num_rows,
            *(dy_ptr, row_ids_ptr, bias_ptr, bias_table_ptr, tiles_ptr, H, stride_dy_r, stride_bias_e),
            *(BLOCK_M, TILE.BLOCK_K),
        )
        num_partials = num_f + 1
    row_M1 = tl.arange(0, BLOCK_M)[:, None]
    dy = (dy_ptr, dy_desc, row_ids_ptr, stride_dy_r)
    w = (w_ptr, w_desc, w_table_ptr, num_experts, stride_w_e, stride_w_f, stride_w_h)
    t, b = (t_ptr, t_desc, None, rank), (b_ptr, b_desc, None, num_experts, stride_b_e, stride_b_n, stride_b_k)
    for tile_index in tl.range(tl.program_id(0), num_m * num_f, tl.num_programs(0), flatten=FLATTEN):
        m_tile, f_tile = tile_at(tile_index, num_m, num_f, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        _, first, rows = tile
        f, mask_M1 = f_tile * TILE.BLOCK_N, row_M1 < rows
        da = zeros(BLOCK_M, TILE.BLOCK_N, num_m, FLATTEN)
        da = product(da, dy, w, tile, f, F, H, K_CONTIGUOUS, REVERSED, ALIGNED, TILE.BLOCK_K, PRECISION)
        if t_ptr is not None:
            da = product(da, t, b, tile, f, F, rank, K_CONTIGUOUS, False, True, TILE.BLOCK_K, PRECISION)

        # The next subtile of `h` is loaded while one is computed: waits for memory would be a third of a tile's time.
        # The first is loaded after the loop over H: earlier, it would have the layout of `da`, at 60 registers.
        h_M1 = h_ptr + (first + row_M1).to(tl.int64) * stride_h_r + f * STEP
        l_M1, left = h_M1 + F, F - f
        if VECTOR > 1:
            h_M1, l_M1 = tl.multiple_of(h_M1, (16, 16)), tl.multiple_of(l_M1, (16, 16))
            left = tl.multiple_of(left, VECTOR)
        g_next, l_next = _load_h(h_M1, l_M1, mask_M1, left, WIDTH, ACT)
        dh_M1 = dh_ptr + (first + row_M1).to(tl.int64) * stride_h_r
        a_M1 = a_ptr + (first + row_M1).to(tl.int64) * stride_a_r
        dprobs_M1 = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
        probs_M1 = None
        if probs_ptr is not None:
            probs_M1 = tl.load(probs_ptr + first + row_M1, mask=mask_M1, other=0.0).to(tl.float32)
        subtiles = column_subtiles(da, SUBTILES)
        for s in tl.static_range(SUBTILES):
            da_MF = subtiles[s]
            column = f + s * WIDTH
            g, l = to_fp32(g_next), to_fp32(l_next)
            if s + 1 < SUBTILES:
                h_M1, l_M1, left = h_M1 + WIDTH_G, l_M1 + WIDTH, left - WIDTH
                g_next, l_next = _load_h(h_M1, l_M1, mask_M1, left, WIDTH, ACT)
            if STEP == 2:
                g, l = tl.split(tl.reshape(g, (BLOCK_M, WIDTH, 2)))
            da_MF, a, by_gate, by_linear, dprobs_M1 = backward(da_MF, g, l, dprobs_M1, probs_M1, ACT)
            dg_MF = round_to(da_MF * by_gate, dh_ptr.dtype.element_ty)
            dl_MF = round_to(da_MF * by_linear, dh_ptr.dtype.element_ty)
            if activation.halves(ACT) == 2:
                store_halves(dh_desc, dh_M1, first, rows, mask_M1, column, F, dg_MF, dl_MF)
            else:
                if STEP == 2:
                    dg_MF = tl.reshape(tl.join(dg_MF, dl_MF), (BLOCK_M, WIDTH_G))
                store_rows(dh_desc, dh_M1, first, rows, mask_M1, column * STEP, F * STEP, dg_MF)
            store_rows(a_desc, a_M1, first, rows, mask_M1, column, F, round_to(a, a_ptr.dtype.element_ty))

        if probs_ptr is not None:
            partial_M1 = partial_ptr + f_tile.to(tl.int64) * num_rows + first + row_M1
            tl.store(partial_M1, dprobs_M1, mask=mask_M1)

    zero_padding(dh_ptr, tiles_ptr, 2 * F if ACT.GATED else F, stride_h_r, 1, BLOCK_M, WIDTH)
    zero_padding(a_ptr, tiles_ptr, F, stride_a_r, 1, BLOCK_M, WIDTH)
    if probs_ptr is not None:
        zero_padding(partial_ptr, tiles_ptr, num_partials, 1, num_rows, BLOCK_M, 4)
