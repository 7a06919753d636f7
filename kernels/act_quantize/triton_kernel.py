"""The activation and its backward between GEMMs that store 16 bits, quantized for GEMMs that read 8.

With `g`, `l` the gate and linear parts of `h`, and `p` the routing probability:
    a = p * act(g, l)
    dh_g = p * d * d act / dg,    dh_l = p * d * d act / dl,    dprobs[r] = sum_f d[r, f] * act[r, f]
where `d = dy @ fc2` is the gradient of `a`. `a` and `dh` are rounded to the dtype of `h` before they are quantized: the
copies have the bytes that `quantize` makes of the 16-bit results of the passes `fc1_act` and `dgrad_act`.

A program has a tile and BLOCK_F columns of `a`, a part of a chunk. In backward they divide F, so columns of one half of
`dh` never reach into the other. Programs past F store the scales that remain of the last chunks, those of zeros.

A backward program for mxfp8 holds a whole tile, 32 columns wide. For fp8_block, whose blocks are 128 rows or 128
columns, registers are too few for a tile of 128 columns: a program first stores token copies, 16 columns at a time, and
then the rest, 16 rows at a time, from the same inputs, which are then in a cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import activation
from ..device.quantization import CHUNK, rows_of_tile, store_row_copy, store_token_copy
from ..device.tile_order import load_tile, zero_padding
from ..device.tiles import load_rows, round_to, store_rows, to_fp32


@triton.jit
def _gates_and_linear(h, row_M, place, f, F, WIDTH: tl.constexpr, ACT: tl.constexpr):
    """Gates and linear channels from `f` on, `[M, WIDTH]` fp32 each, zero past the ends; without a linear part, gates
    twice.

    `h`: pointer and stride. `place`: tile, first row and number of rows; `row`: rows of the tile.
    """
    h_ptr, stride_h_r = h
    _, first, rows = place
    STEP: tl.constexpr = ACT.CHANNEL_STEP
    mask_M1, h_M1 = row_M[:, None] < rows, h_ptr + (first + row_M[:, None]).to(tl.int64) * stride_h_r
    g = to_fp32(load_rows(None, h_M1, first, rows, mask_M1, f * STEP, F * STEP, WIDTH * STEP))
    l = g
    if activation.halves(ACT) == 2:
        l = to_fp32(load_rows(None, h_M1, first, rows, mask_M1, F + f, 2 * F, WIDTH))
    if STEP == 2:
        g, l = tl.split(tl.reshape(g, (g.shape[0], WIDTH, 2)))
    return g, l


@triton.jit
def _probs(probs_ptr, row_M, place):
    """`[M, 1]` fp32, zero past the end."""
    _, first, rows = place
    return tl.load(probs_ptr + first + row_M[:, None], mask=row_M[:, None] < rows, other=0.0).to(tl.float32)


@triton.jit
def _store(outputs, x_MN, row_M, place, column, end, num_columns, DTYPE: tl.constexpr, RECIPE: tl.constexpr):
    """Round to DTYPE, and store what there is of a row copy, a token copy and DTYPE itself; nothing from `end` on.

    `outputs`: pointers to elements and scales of the row copy, to those of the token copy, and to DTYPE.
    """
    row_copy_ptr, row_scales_ptr, token_copy_ptr, token_scales_ptr, rounded_ptr = outputs
    tile, first, rows = place
    if column < end:
        rounded = round_to(x_MN, DTYPE)
        if rounded_ptr is not None:
            out_M1 = rounded_ptr + (first + row_M[:, None]).to(tl.int64) * num_columns
            store_rows(None, out_M1, first, rows, row_M[:, None] < rows, column, num_columns, rounded)
        x_MN = to_fp32(rounded)
        if row_copy_ptr is not None:
            store_row_copy(row_copy_ptr, row_scales_ptr, x_MN, row_M, tile, first, rows, column, num_columns, RECIPE)
        if token_copy_ptr is not None:
            store_token_copy(token_copy_ptr, token_scales_ptr, x_MN, tile, column, num_columns, RECIPE)


@triton.jit(do_not_specialize=["num_f"])
def _act_quantize_kernel(
    h_ptr,
    probs_ptr,
    copy_ptr,
    scales_ptr,
    tiles_ptr,
    num_f,
    F,
    stride_h_r,
    ACT: tl.constexpr,
    RECIPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """`h` `[R, G]`; `probs` `[R]`; `copy`: a row copy of `a`. `num_f`: parts of a tile's columns, of
    which a program takes BLOCK_R rows. `tiles`: a plan's table of tiles. Absent inputs are None.
    """
    PARTS: tl.constexpr = CHUNK // BLOCK_R
    tile, f = tl.program_id(0) // PARTS // num_f, tl.program_id(0) // PARTS % num_f * BLOCK_F
    if tile < tl.load(tiles_ptr):
        _, first, rows = load_tile(tiles_ptr, tile)
        h, place = (h_ptr, stride_h_r), (tile, first, rows)
        row_M = tl.program_id(0) % PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
        g, l = _gates_and_linear(h, row_M, place, f, F, BLOCK_F, ACT)
        a_MF, _, _ = activation.activate(g, l, ACT)
        if probs_ptr is not None:
            a_MF *= _probs(probs_ptr, row_M, place)
        outputs, end = (copy_ptr, scales_ptr, None, None, None), tl.cdiv(F, CHUNK) * CHUNK
        _store(outputs, a_MF, row_M, place, f, end, F, h_ptr.dtype.element_ty, RECIPE)


@triton.jit
def _backward(
    d,
    h,
    probs_ptr,
    a_out,
    dh_out,
    part_ptr,
    row_M,
    place,
    f,
    F,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Store `a` and `dh` of these rows of a tile and columns from `f` on, and their part of `dprobs`.

    `d`: pointer and stride. `h`, `place`: see `_gates_and_linear`. `a_out`, `dh_out`: see `_store`.
    """
    d_ptr, stride_d_r = d
    _, first, rows = place
    STEP: tl.constexpr = ACT.CHANNEL_STEP
    DTYPE: tl.constexpr = h[0].dtype.element_ty
    G = 2 * F if ACT.GATED else F
    end_a, end_dh = tl.cdiv(F, CHUNK) * CHUNK, tl.cdiv(G, CHUNK) * CHUNK
    g, l = _gates_and_linear(h, row_M, place, f, F, WIDTH, ACT)
    d_M1 = d_ptr + (first + row_M[:, None]).to(tl.int64) * stride_d_r
    d_MF = to_fp32(load_rows(None, d_M1, first, rows, row_M[:, None] < rows, f, F, WIDTH))
    a_MF, by_gate, by_linear = activation.activate(g, l, ACT)
    if probs_ptr is not None:
        if part_ptr is not None and f < F:
            tl.store(part_ptr + first + row_M, tl.sum(d_MF * a_MF, axis=1), mask=row_M < rows)
        probs_M1 = _probs(probs_ptr, row_M, place)
        d_MF *= probs_M1
        a_MF *= probs_M1
    _store(a_out, a_MF, row_M, place, f, end_a, F, DTYPE, RECIPE)
    dg_MF, dl_MF = d_MF * by_gate, d_MF * by_linear
    if activation.halves(ACT) == 2:
        _store(dh_out, dg_MF, row_M, place, f, F, G, DTYPE, RECIPE)
        _store(dh_out, dl_MF, row_M, place, F + f, end_dh, G, DTYPE, RECIPE)
    else:
        if STEP == 2:
            dg_MF = tl.reshape(tl.join(dg_MF, dl_MF), (dg_MF.shape[0], STEP * WIDTH))
        _store(dh_out, dg_MF, row_M, place, f * STEP, end_dh, G, DTYPE, RECIPE)


@triton.jit(do_not_specialize=["num_f", "num_partials", "num_rows"])
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
    ACT: tl.constexpr,
    RECIPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """`d` `[R, F]`; `h` `[R, G]`; `probs` `[R]`; `dh` `[R, G]` and `a` `[R, F]`, contiguous, beside
    their copies; `partial` `[num_partials, R]` fp32. `num_f`: programs of a tile, which take BLOCK_R rows at a time, or
    as many columns. `tiles`: a plan's table of tiles. Absent inputs and outputs are None.
    """
    tile, f = tl.program_id(0) // num_f, tl.program_id(0) % num_f * BLOCK_F
    if tile < tl.load(tiles_ptr):
        _, first, rows = load_tile(tiles_ptr, tile)
        d, h, place = (d_ptr, stride_d_r), (h_ptr, stride_h_r), (tile, first, rows)
        part_ptr = partial_ptr
        if partial_ptr is not None:
            part_ptr += (f // BLOCK_F).to(tl.int64) * num_rows
        if BLOCK_R == CHUNK:
            a_out = (None, None, a_token_copy_ptr, a_token_scales_ptr, a_ptr)
            dh_out = (dh_row_copy_ptr, dh_row_scales_ptr, dh_token_copy_ptr, dh_token_scales_ptr, dh_ptr)
            _backward(d, h, probs_ptr, a_out, dh_out, part_ptr, rows_of_tile(RECIPE), place, f, F, BLOCK_F, ACT, RECIPE)
        else:
            a_out = (None, None, a_token_copy_ptr, a_token_scales_ptr, None)
            dh_out = (None, None, dh_token_copy_ptr, dh_token_scales_ptr, None)
            if a_token_copy_ptr is not None or dh_token_copy_ptr is not None:
                for part in range(f, f + BLOCK_F, BLOCK_R):
                    _backward(
                        d, h, probs_ptr, a_out, dh_out, None, rows_of_tile(RECIPE), place, part, F, BLOCK_R, ACT, RECIPE
                    )
            a_out = (None, None, None, None, a_ptr)
            dh_out = (dh_row_copy_ptr, dh_row_scales_ptr, None, None, dh_ptr)
            for part in range(0, CHUNK, BLOCK_R):
                row_M = part + tl.arange(0, BLOCK_R)
                _backward(d, h, probs_ptr, a_out, dh_out, part_ptr, row_M, place, f, F, BLOCK_F, ACT, RECIPE)

    if partial_ptr is not None:
        zero_padding(partial_ptr, tiles_ptr, num_partials, 1, num_rows, CHUNK, 4)
    if dh_ptr is not None:
        G = 2 * F if ACT.GATED else F
        zero_padding(dh_ptr, tiles_ptr, G, G, 1, CHUNK, 32)
    if a_ptr is not None:
        zero_padding(a_ptr, tiles_ptr, F, F, 1, CHUNK, 32)
