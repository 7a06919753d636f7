"""Backward of `triton_kernel.py` for recipe fp8_block on Hopper, from tiles in shared memory.

A program copies 128 rows of `d` and `h` into shared memory. Part by part it computes `a` and `dh`, once, stores what
goes by rows, and writes both, rounded, where `d` and `h` were. From there it makes the token copies.
`triton_kernel.py`, whose registers do not hold a tile, computes everything twice.

Two programs share a multiprocessor: one loads while the other one computes.
"""

from ..device import activation
from ..device.quantization import CHUNK
from ..device.tile_order import load_tile, zero_padding_at
from ..device.tiles import round_to, to_fp32
from ..warp_specialized.gluon_compat import gl, gluon
from ..warp_specialized.staged import (
    PARTS,
    ROWS,
    begin_to_copy,
    by_rows,
    finish_copies,
    rows_of_part,
    staged_tile,
    store_by_rows,
    store_row_copy,
    store_token_copy,
)
from ..warp_specialized.subtiles import whole_rows


@gluon.jit
def _backward(d, h_MG, linear_MG, part, place, probs_ptr, part_ptr, ACT: gl.constexpr):
    """`(a, dh, linear half of dh)` of a part in fp32, from the tile of `d`, columns of one chunk of `h`, and the same
    ones of its linear half; without halves the third is the second. The part's share of `dprobs` is stored.
    """
    first, rows = place
    STEP: gl.constexpr = ACT.CHANNEL_STEP
    g_MF, l_MF = h_MG, linear_MG
    if STEP == 2:
        g_MF, l_MF = gl.split(gl.reshape(h_MG, (ROWS, CHUNK // 2, 2)))
    d_MF = to_fp32(d.index(part).load(g_MF.type.layout))
    row_M = rows_of_part(part, gl.SliceLayout(1, g_MF.type.layout))
    probs_M1 = None
    if probs_ptr is not None:  # here, as the compiler moves no load before a store
        probs_M1 = gl.load(probs_ptr + first + row_M, mask=row_M < rows, other=0.0).to(gl.float32)[:, None]
    a_MF, by_gate, by_linear = activation.activate(g_MF, l_MF, ACT)
    if probs_ptr is not None:
        if part_ptr is not None:
            gl.store(part_ptr + first + row_M, gl.sum(d_MF * a_MF, axis=1), mask=row_M < rows)
        d_MF *= probs_M1
        a_MF *= probs_M1
    dg_MF, dl_MF = d_MF * by_gate, d_MF * by_linear
    if STEP == 2:
        dg_MF = gl.convert_layout(gl.reshape(gl.join(dg_MF, dl_MF), (ROWS, CHUNK)), h_MG.type.layout)
        dl_MF = dg_MF
    return a_MF, dg_MF, dl_MF


@gluon.jit
def _finish(tile, x_MN, part, m_tile, place, outputs, column, num_columns):
    """Round a part, store it and its row copy, and keep it in the tile if there is a token copy.

    `outputs`: pointers to 16 bits, to elements and scales of the row copy, and to the token copy; None where absent.
    """
    ptr, row_copy_ptr, row_scales_ptr, token_copy_ptr = outputs
    first, rows = place
    x_MN = round_to(x_MN, tile.dtype)
    row_M = rows_of_part(part, gl.SliceLayout(1, x_MN.type.layout))
    if token_copy_ptr is not None:
        tile.index(part).store(x_MN)
    if ptr is not None:
        store_by_rows(x_MN, ptr, row_M, first, rows, column, num_columns)
    if row_copy_ptr is not None:
        rounded = to_fp32(x_MN)
        store_row_copy(rounded, row_copy_ptr, row_scales_ptr, row_M, m_tile, first, rows, column, num_columns)


@gluon.jit(do_not_specialize=["num_f", "num_partials", "num_rows"])
def _dgrad_act_quantize_kernel(
    d_ptr,
    h_ptr,
    probs_ptr,
    dh_row_copy_ptr,
    dh_row_scales_ptr,
    dh_token_copy_ptr,
    dh_token_scales_ptr,
    dh_ptr,
    a_token_copy_ptr,
    a_token_scales_ptr,
    a_ptr,
    partial_ptr,
    tiles_ptr,
    num_f,
    num_partials,
    num_rows,
    F,
    stride_d_r,
    stride_h_r,
    ACT: gl.constexpr,
):
    """Arguments as in the Triton kernel. `d` and `h` have 16 bits; strides and F are multiples of 16, and F of 128. A
    program has one chunk of columns of `dh`, or of each of its halves.
    """
    STEP: gl.constexpr = ACT.CHANNEL_STEP
    HALVES: gl.constexpr = activation.halves(ACT)
    DTYPE: gl.constexpr = h_ptr.dtype.element_ty
    BLOCK_F: gl.constexpr = CHUNK // STEP
    G = HALVES * STEP * F
    m_tile, f = gl.program_id(0) // num_f, gl.program_id(0) % num_f * BLOCK_F
    if m_tile < gl.load(tiles_ptr):
        _, first, rows = load_tile(tiles_ptr, m_tile)
        place = first, rows
        d, h = staged_tile(DTYPE, BLOCK_F), staged_tile(DTYPE, CHUNK)
        linear = h
        begin_to_copy(d, d_ptr, stride_d_r, None, first, rows, f, F)
        begin_to_copy(h, h_ptr, stride_h_r, None, first, rows, f * STEP, G)
        if HALVES == 2:
            linear = staged_tile(DTYPE, CHUNK)
            begin_to_copy(linear, h_ptr, stride_h_r, None, first, rows, F + f, G)
        part_ptr = partial_ptr
        if partial_ptr is not None:
            part_ptr += (f // BLOCK_F).to(gl.int64) * num_rows
        a_out = a_ptr, None, None, a_token_copy_ptr
        dh_out = dh_ptr, dh_row_copy_ptr, dh_row_scales_ptr, dh_token_copy_ptr
        finish_copies()
        for part in range(PARTS):
            h_MG = to_fp32(h.index(part).load(by_rows()))
            linear_MG = to_fp32(linear.index(part).load(by_rows())) if HALVES == 2 else h_MG
            a_MF, dh_MG, dl_MG = _backward(d, h_MG, linear_MG, part, place, probs_ptr, part_ptr, ACT)
            _finish(d, a_MF, part, m_tile, place, a_out, f, F)
            _finish(h, dh_MG, part, m_tile, place, dh_out, f * STEP, G)
            if HALVES == 2:
                _finish(linear, dl_MG, part, m_tile, place, dh_out, F + f, G)
        if a_token_copy_ptr is not None:
            store_token_copy(d, a_token_copy_ptr, a_token_scales_ptr, m_tile, f, F)
        if dh_token_copy_ptr is not None:
            store_token_copy(h, dh_token_copy_ptr, dh_token_scales_ptr, m_tile, f * STEP, G)
            if HALVES == 2:
                store_token_copy(linear, dh_token_copy_ptr, dh_token_scales_ptr, m_tile, F + f, G)

    row_M1, column_1N = whole_rows(CHUNK)
    if partial_ptr is not None:
        zero_padding_at(partial_ptr, tiles_ptr, num_partials, 1, num_rows, row_M1, column_1N)
    if dh_ptr is not None:
        zero_padding_at(dh_ptr, tiles_ptr, G, G, 1, row_M1, column_1N)
    if a_ptr is not None:
        zero_padding_at(a_ptr, tiles_ptr, F, F, 1, row_M1, column_1N)
