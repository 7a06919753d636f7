"""Pass (1) of 8-bit operands (recipe fp8_block) on Hopper, warp-specialized, which also quantizes the activation: the
partitions of the pass gemm (`warp_specialized/fp8_block.py`) with an epilogue of its own.

A consumer has two parts of 128 columns of `h`, so it has whole blocks of 128 columns of the activation. The parts are
gates and linear channels of one block or, interleaved, one half of a block each, or without a linear part two blocks.

Each consumer has a buffer for 64 columns of `h`, and one for a block of the activation: beside the ring of operands
there is no room for more.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device import activation
from ..device.quantization import chunk_of_scales, exponent_of_zeros, in_whole_rows, store_scales
from ..device.tile_order import load_tile, tile_at, zero_padding_at
from ..device.tiles import column_subtiles, expert_base, paired, round_to, side_by_side
from ..warp_specialized.fp8_block import BLOCK, load_operands, operands, product
from ..warp_specialized.gluon_compat import gl, gluon, tma_store, tma_store_wait
from ..warp_specialized.hopper import ROWS
from ..warp_specialized.partitions import worker_registers, worker_warps
from ..warp_specialized.ring import (
    column_numbers,
    load_for_rows,
    overwrite,
    row_numbers,
    shared_tiles,
    whole_rows,
    write,
)
from .epilogue import activate, pre_activation


@gluon.jit
def _store_h(h_MG, h_desc, place, half: gl.constexpr, column, buffer, HALVES: gl.constexpr, RUNNING: gl.constexpr):
    """Store a part of `h` through the consumer's buffer, some columns at a time.

    RUNNING: stores since the last one from this buffer, which may still read.
    """
    wrap, end, row = place
    WIDTH: gl.constexpr = buffer.shape[1]
    pieces = column_subtiles(h_MG, BLOCK // WIDTH)
    for s in gl.static_range(BLOCK // WIDTH):
        overwrite(buffer, pieces[s], RUNNING if s == 0 else 0)
        if HALVES == 2:
            tma_store(h_desc, [wrap, end, row, half, column + s * WIDTH], buffer)
        else:
            tma_store(h_desc, [wrap, end, row, column + s * WIDTH], buffer)


@gluon.jit
def _store_block(a_MF, outputs, m_tile, tile, place, column, buffer, DTYPE: gl.constexpr, CONSUMER: gl.constexpr):
    """Multiply a block of the activation by `probs`, round it as `h`, quantize it, and store it with its scales.

    The last store of `h` has waited for the one before from this buffer. A bias makes values of rows past the expert's
    end, which are not stored: their scales are those of zeros.
    """
    probs_ptr, a_desc, a_scales_ptr, F = outputs
    _, first, rows = tile
    wrap, end, row = place
    if probs_ptr is not None:
        a_MF *= load_for_rows(probs_ptr + first, a_MF, CONSUMER * ROWS, rows)
    copy, exponent_M = in_whole_rows(paired(round_to(a_MF, DTYPE)).to(gl.float32), "fp8_block")
    write(buffer, copy)
    tma_store(a_desc, [wrap, end, row, column], buffer)
    if column < F:
        row_M = row_numbers(a_MF, CONSUMER * ROWS)
        exponent_M = gl.where(row_M < rows, exponent_M, exponent_of_zeros("fp8_block"))
        store_scales(chunk_of_scales(a_scales_ptr, m_tile, column, F), exponent_M, row_M, 0, "fp8_block")


@gluon.jit
def _consume(
    arguments,
    w_scales_ptr,
    outputs,
    pipeline,
    h_out,
    a_out,
    CONSUMER: gl.constexpr,
    ACT: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of a consumer; `h_out`, `a_out`: its buffers for stores."""
    bias_ptr, bias_table_ptr, stride_bias_e, h_desc, tiles_ptr, H = arguments
    F = outputs[3]
    HALVES: gl.constexpr = activation.halves(ACT)
    STEP: gl.constexpr = ACT.CHANNEL_STEP
    DTYPE: gl.constexpr = h_out.dtype
    num_m, num_n = pipeline[0], pipeline[1]
    num_gates = F * STEP
    h_buffer, a_buffer = h_out.index(CONSUMER), a_out.index(CONSUMER)
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        place = to_ragged_indices(tile[1], tile[2], CONSUMER * ROWS)
        parts, i = product(i, tile[0], n_tile, HALVES * num_gates, H, w_scales_ptr, pipeline, CONSUMER, TILE, HALVES)
        bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, tile[0]) if bias_ptr is not None else None
        column = n_tile * (TILE.BLOCK_N // HALVES)
        if HALVES == 2:
            column_1G = column_numbers(parts[0], column)
            h_MG, l_MF = pre_activation(parts[0], parts[1], bias, column_1G, num_gates, ACT, DTYPE)
            _store_h(h_MG, h_desc, place, 0, column, h_buffer, HALVES, 1)
            _store_h(l_MF, h_desc, place, 1, column, h_buffer, HALVES, 0)
            a_MF = activate(h_MG, l_MF, ACT)
            _store_block(a_MF, outputs, m_tile, tile, place, column, a_buffer, DTYPE, CONSUMER)
        else:
            left, _ = pre_activation(parts[0], parts[0], bias, column_numbers(parts[0], column), num_gates, ACT, DTYPE)
            _store_h(left, h_desc, place, 0, column, h_buffer, HALVES, 1)
            a_MF = activate(left, left, ACT)
            if STEP == 1:
                _store_block(a_MF, outputs, m_tile, tile, place, column, a_buffer, DTYPE, CONSUMER)
            column_1G = column_numbers(parts[1], column + BLOCK)
            right, _ = pre_activation(parts[1], parts[1], bias, column_1G, num_gates, ACT, DTYPE)
            _store_h(right, h_desc, place, 0, column + BLOCK, h_buffer, HALVES, 2 - STEP)
            right = activate(right, right, ACT)
            a_MF = side_by_side(a_MF, right) if STEP == 2 else right
            a_column = column // 2 if STEP == 2 else column + BLOCK
            _store_block(a_MF, outputs, m_tile, tile, place, a_column, a_buffer, DTYPE, CONSUMER)
    tma_store_wait(0)


@gluon.jit
def grouped_fc1_act_fp8_block_kernel(
    x_desc,
    x_scales_desc,
    w_desc,
    w_scales_ptr,
    bias_ptr,
    bias_table_ptr,
    probs_ptr,
    h_ptr,
    h_desc,
    a_desc,
    a_scales_ptr,
    tiles_ptr,
    H,
    F,
    stride_bias_e,
    stride_h_r,
    ACT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`x` `[R, H]` and `w` `[E, G, H]` e4m3, with scales as in the pass gemm; `bias` `[E, G]`; `probs` `[R]`; `h` `[R,
    G]`; `a` and its scales: a row copy of act * probs, `[R, F]`, with F a multiple of 128.
    """
    HALVES: gl.constexpr = activation.halves(ACT)
    num_gates = F * ACT.CHANNEL_STEP
    x, w, scales, full, empty = operands(x_desc.dtype, TILE)
    pipeline = (gl.load(tiles_ptr), gl.cdiv(HALVES * num_gates, TILE.BLOCK_N), x, w, scales, full, empty)
    h_out = shared_tiles(h_desc.dtype, CONSUMERS, ROWS, TILE.BLOCK_N // TILE.SUBTILES)
    a_out = shared_tiles(a_desc.dtype, CONSUMERS, ROWS, BLOCK)
    arguments = (bias_ptr, bias_table_ptr, stride_bias_e, h_desc, tiles_ptr, H)
    outputs = (probs_ptr, a_desc, a_scales_ptr, F)
    loads = (x_desc, x_scales_desc, w_desc, tiles_ptr)
    gl.warp_specialize(
        [
            (_consume, (arguments, w_scales_ptr, outputs, pipeline, h_out, a_out, gl.constexpr(0), ACT, TILE)),
            (_consume, (arguments, w_scales_ptr, outputs, pipeline, h_out, a_out, gl.constexpr(1), ACT, TILE)),
            (load_operands, (loads, H, pipeline, TILE, HALVES)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
    row_M1, column_1N = whole_rows(2 * ROWS)
    zero_padding_at(h_ptr, tiles_ptr, HALVES * num_gates, stride_h_r, 1, row_M1, column_1N)
