"""Pass (1) with a task for each warp, for Hopper: the tiles of `grouped_fc1_act.py` in the same order, long loads.

One warp loads (TMA, `ring.py`); two warpgroups multiply, each 64 of a tile's rows by both channels of its columns, and
store `h` and `a` while the other still multiplies and the next tile's operands arrive: no barrier of the whole block.
Halves of `h` leave one by one, and then `a`, from as many buffers in turn: HALVES + 1 of each consumer.
"""

from triton.tools.ragged_tma import to_ragged_indices

from . import activation
from .common import column_subtiles, expert_base, load_bias_at, paired
from .gluon import gl, gluon, tma_store, tma_store_wait
from .ring import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    load_operands,
    operands,
    overwrite,
    places,
    product,
    shared_tiles,
    whole_rows,
)
from .schedule import load_tile, tile_at, zero_padding_at


@gluon.jit
def _multiply_and_store(
    bias_ptr,
    bias_table_ptr,
    stride_bias_e,
    probs_ptr,
    h_desc,
    a_desc,
    tiles_ptr,
    H,
    F,
    loop,
    h_out,
    a_out,
    WHICH: gl.constexpr,
    GATED: gl.constexpr,
    CHANNEL_STEP: gl.constexpr,
    CURVE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    OFFSET: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    BLOCK_F: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SUBTILES: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    HALVES: gl.constexpr = 2 if GATED and CHANNEL_STEP == 1 else 1
    COLUMNS: gl.constexpr = HALVES * BLOCK_F * CHANNEL_STEP
    WIDTH: gl.constexpr = BLOCK_F // SUBTILES
    num_m, num_f = loop[0], loop[1]
    i = 0
    for place in range(gl.program_id(0), num_m * num_f, gl.num_programs(0)):
        m_tile, f_tile = tile_at(place, num_m, num_f, GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, WHICH * ROWS)
        acc, i = product(i, H, loop, WHICH, COLUMNS, BLOCK_H, K_CONTIGUOUS, STAGES)
        parts = column_subtiles(acc, HALVES * SUBTILES)
        for s in gl.static_range(SUBTILES):
            column = f_tile * BLOCK_F + s * WIDTH
            h_MG, l_MF = parts[s], parts[(HALVES - 1) * SUBTILES + s]  # the same where there are no halves
            if bias_ptr is not None:
                bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
                column_1G = places(h_MG, 0, column * CHANNEL_STEP)[1]
                h_MG += load_bias_at(bias, column_1G, F * CHANNEL_STEP)
                if HALVES == 2:
                    l_MF += load_bias_at(bias + F, column_1G, F)
            h_MG, l_MF = paired(h_MG.to(h_out.dtype)), paired(l_MF.to(h_out.dtype))
            buffer = h_out.index(WHICH * HALVES)
            overwrite(buffer, h_MG, HALVES)
            if HALVES == 2:
                tma_store(h_desc, [wrap, end, row, 0, column], buffer)
                overwrite(h_out.index(WHICH * HALVES + 1), l_MF, HALVES)
                tma_store(h_desc, [wrap, end, row, 1, column], h_out.index(WHICH * HALVES + 1))
            else:
                tma_store(h_desc, [wrap, end, row, column * CHANNEL_STEP], buffer)
            g, l = h_MG.to(gl.float32), l_MF.to(gl.float32)
            if CHANNEL_STEP == 2:
                g, l = gl.split(gl.reshape(g, (ROWS, WIDTH, 2)))
            if GATED:
                a = activation.gated(g, l, CURVE, ALPHA, LIMIT, OFFSET)[0]
            else:
                a = activation.curve(g, CURVE, ALPHA)[0]
            if probs_ptr is not None:
                row_M1 = places(a, WHICH * ROWS, 0)[0]
                a *= gl.load(probs_ptr + first + row_M1, mask=row_M1 < rows, other=0.0).to(gl.float32)
            overwrite(a_out.index(WHICH), a.to(a_out.dtype), HALVES)
            tma_store(a_desc, [wrap, end, row, column], a_out.index(WHICH))
    tma_store_wait(0)


@gluon.jit
def grouped_fc1_act_specialised_kernel(
    x_desc,
    w_desc,
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
    stride_bias_e,
    stride_h_r,
    stride_a_r,
    GATED: gl.constexpr,
    CHANNEL_STEP: gl.constexpr,
    CURVE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    OFFSET: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_F: gl.constexpr,
    BLOCK_H: gl.constexpr,
    SUBTILES: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Pass (1); arguments as of the Triton kernel."""
    gl.static_assert(BLOCK_M == CONSUMERS * ROWS)
    HALVES: gl.constexpr = 2 if GATED and CHANNEL_STEP == 1 else 1
    BLOCK_G: gl.constexpr = BLOCK_F * CHANNEL_STEP
    WIDTH: gl.constexpr = BLOCK_F // SUBTILES
    x, w, full, empty = operands(x_desc.dtype, HALVES * BLOCK_G, BLOCK_H, K_CONTIGUOUS, STAGES)
    loop = (gl.load(tiles_ptr), gl.cdiv(F, BLOCK_F), x, w, full, empty)
    h_out = shared_tiles(h_desc.dtype, CONSUMERS * HALVES, ROWS, WIDTH * CHANNEL_STEP)
    a_out = shared_tiles(a_desc.dtype, CONSUMERS, ROWS, WIDTH)
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply_and_store, (
                bias_ptr, bias_table_ptr, stride_bias_e, probs_ptr, h_desc, a_desc, tiles_ptr, H, F, loop, h_out, a_out,
                gl.constexpr(0), GATED, CHANNEL_STEP, CURVE, ALPHA, LIMIT, OFFSET,
                K_CONTIGUOUS, BLOCK_F, BLOCK_H, SUBTILES, GROUP_M, STAGES,
            )),
            (_multiply_and_store, (
                bias_ptr, bias_table_ptr, stride_bias_e, probs_ptr, h_desc, a_desc, tiles_ptr, H, F, loop, h_out, a_out,
                gl.constexpr(1), GATED, CHANNEL_STEP, CURVE, ALPHA, LIMIT, OFFSET,
                K_CONTIGUOUS, BLOCK_F, BLOCK_H, SUBTILES, GROUP_M, STAGES,
            )),
            (load_operands, (
                x_desc, w_desc, tiles_ptr, num_experts, H, loop,
                REVERSED, K_CONTIGUOUS, HALVES, BLOCK_G, BLOCK_H, GROUP_M, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on
    row_M1, column_1N = whole_rows(BLOCK_M)
    zero_padding_at(h_ptr, tiles_ptr, 2 * F if GATED else F, stride_h_r, 1, row_M1, column_1N)
    zero_padding_at(a_ptr, tiles_ptr, F, stride_a_r, 1, row_M1, column_1N)
