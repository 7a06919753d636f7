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
from ..device.tiles import column_subtiles, expert_base, round_to, side_by_side, to_fp32
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
    """Store columns of `h` through the consumer's buffer. RUNNING: stores since the last one from it, which may still
    read.
    """
    wrap, end, row = place
    overwrite(buffer, h_MG, RUNNING)
    if HALVES == 2:
        tma_store(h_desc, [wrap, end, row, half, column], buffer)
    else:
        tma_store(h_desc, [wrap, end, row, column], buffer)


@gluon.jit
def _half_of_block(
    parts,
    probs_M1,
    arguments,
    expert,
    place,
    column,
    buffer,
    B: gl.constexpr,
    S: gl.constexpr,
    ACT: gl.constexpr,
):
    """Half S of the activation's block B, times `probs` and rounded as `h`, of which its columns are stored."""
    bias_ptr, bias_table_ptr, stride_bias_e, h_desc, F = arguments
    HALVES: gl.constexpr = activation.halves(ACT)
    # The first store of a block follows one of the activation.
    RUNNING: gl.constexpr = 1 if S == 0 else 0
    bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert) if bias_ptr is not None else None
    h_MG = parts[S] if ACT.CHANNEL_STEP == 2 else column_subtiles(parts[B], 2)[S]
    l_MF = column_subtiles(parts[1], 2)[S] if HALVES == 2 else h_MG
    num_gates = F * ACT.CHANNEL_STEP
    h_MG, l_MF = pre_activation(h_MG, l_MF, bias, column_numbers(h_MG, column), num_gates, ACT, buffer.dtype)
    if ACT.CHANNEL_STEP == 2:
        left, right = column_subtiles(h_MG, 2)
        _store_h(left, h_desc, place, 0, column, buffer, HALVES, RUNNING)
        _store_h(right, h_desc, place, 0, column + buffer.shape[1], buffer, HALVES, 0)
    else:
        _store_h(h_MG, h_desc, place, 0, column, buffer, HALVES, RUNNING)
        if HALVES == 2:
            _store_h(l_MF, h_desc, place, 1, column, buffer, HALVES, 0)
    a_MF = activate(h_MG, l_MF, ACT)
    if probs_M1 is not None:
        a_MF *= gl.convert_layout(probs_M1, a_MF.type.layout)
    return round_to(a_MF, buffer.dtype)


@gluon.jit
def _store_block(a_MF, outputs, m_tile, rows, place, column, buffer, CONSUMER: gl.constexpr):
    """Quantize a block of the activation, and store it with its scales.

    The last store of `h` has waited for the one before from this buffer. A bias makes values of rows past the expert's
    end, which are not stored: their scales are those of zeros.
    """
    a_desc, a_scales_ptr, F = outputs
    wrap, end, row = place
    copy, exponent_M = in_whole_rows(to_fp32(a_MF), "fp8_block")
    write(buffer, copy)
    tma_store(a_desc, [wrap, end, row, column], buffer)
    if column < F:
        row_M = row_numbers(a_MF, CONSUMER * ROWS)
        exponent_M = gl.where(row_M < rows, exponent_M, exponent_of_zeros("fp8_block"))
        store_scales(chunk_of_scales(a_scales_ptr, m_tile, column, F), exponent_M, row_M, 0, "fp8_block")


@gluon.jit
def _consume(
    arguments,
    inputs,
    outputs,
    pipeline,
    buffers,
    CONSUMER: gl.constexpr,
    ACT: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of a consumer; `buffers`: for stores of `h` and of the activation, of both consumers."""
    w_scales_ptr, probs_ptr, tiles_ptr, H, F = inputs
    h_buffer, a_buffer = buffers[0].index(CONSUMER), buffers[1].index(CONSUMER)
    HALVES: gl.constexpr = activation.halves(ACT)
    STEP: gl.constexpr = ACT.CHANNEL_STEP
    BLOCKS: gl.constexpr = TILE.BLOCK_N // (HALVES * STEP * BLOCK)  # of the activation, in a tile
    num_m, num_n = pipeline[0], pipeline[1]
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        place = to_ragged_indices(first, rows, CONSUMER * ROWS)
        parts, i = product(i, expert, n_tile, HALVES * STEP * F, H, w_scales_ptr, pipeline, CONSUMER, TILE, HALVES)
        probs_M1 = None
        if probs_ptr is not None:
            probs_M1 = load_for_rows(probs_ptr + first, parts[0], CONSUMER * ROWS, rows)
        for b in gl.static_range(BLOCKS):
            column = (n_tile * BLOCKS + b) * BLOCK
            h_column = column * STEP
            left = _half_of_block(parts, probs_M1, arguments, expert, place, h_column, h_buffer, b, 0, ACT)
            h_column += BLOCK // 2 * STEP
            right = _half_of_block(parts, probs_M1, arguments, expert, place, h_column, h_buffer, b, 1, ACT)
            _store_block(side_by_side(left, right), outputs, m_tile, rows, place, column, a_buffer, CONSUMER)
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
    buffers = (h_out, shared_tiles(a_desc.dtype, CONSUMERS, ROWS, BLOCK))
    arguments = (bias_ptr, bias_table_ptr, stride_bias_e, h_desc, F)
    inputs, outputs = (w_scales_ptr, probs_ptr, tiles_ptr, H, F), (a_desc, a_scales_ptr, F)
    loads = (x_desc, x_scales_desc, w_desc, tiles_ptr)
    gl.warp_specialize(
        [
            (_consume, (arguments, inputs, outputs, pipeline, buffers, gl.constexpr(0), ACT, TILE)),
            (_consume, (arguments, inputs, outputs, pipeline, buffers, gl.constexpr(1), ACT, TILE)),
            (load_operands, (loads, H, pipeline, TILE, HALVES)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
    row_M1, column_1N = whole_rows(2 * ROWS)
    zero_padding_at(h_ptr, tiles_ptr, HALVES * num_gates, stride_h_r, 1, row_M1, column_1N)
