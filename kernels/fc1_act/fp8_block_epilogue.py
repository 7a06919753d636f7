"""Epilogue of pass (1) in 8 bits (recipe fp8_block) on Hopper, which also quantizes the activation.

A consumer has two parts of 128 columns of `h`, so it has whole blocks of 128 columns of the activation. The parts are
gates and linear channels of one block or, interleaved, one half of a block each, or without a linear part two blocks.

Each consumer has a buffer for 64 columns of `h`, and one for a block of the activation: beside the ring of operands
there is no room for more.
"""

from ..device import activation
from ..device.quantization import chunk_of_scales, exponent_of_zeros, in_whole_rows, store_scales
from ..device.tiles import column_subtiles, expert_base, round_to, side_by_side, to_fp32
from ..warp_specialized.gluon_compat import aggregate, gl, gluon, tma_store, value
from ..warp_specialized.ring import shared_tiles
from ..warp_specialized.scaled_rows import CHUNK
from ..warp_specialized.sm_90 import ROWS
from ..warp_specialized.subtiles import (
    WithoutBegin,
    column_numbers,
    load_for_rows,
    overwrite,
    row_numbers,
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


@aggregate
class BlockEpilogue(WithoutBegin):
    """Stores `h`, then each block of the activation that both parts have columns of."""

    arguments: value  # of `_half_of_block`
    probs_ptr: value
    outputs: value  # of `_store_block`
    h_out: value  # buffers of both consumers
    a_out: value
    ACT: value
    TILE: value

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Store a consumer's part of a tile."""
        ACT: gl.constexpr = self.ACT
        BLOCKS: gl.constexpr = self.TILE.BLOCK_N // (activation.halves(ACT) * ACT.CHANNEL_STEP * CHUNK)  # in a tile
        h_buffer, a_buffer = self.h_out.index(CONSUMER), self.a_out.index(CONSUMER)
        place = tile.place(CONSUMER * ROWS)
        parts = accumulators.finish(acc, i, 2)
        probs_M1 = None
        if self.probs_ptr is not None:
            probs_M1 = load_for_rows(self.probs_ptr + tile.first, parts[0], CONSUMER * ROWS, tile.rows)
        for b in gl.static_range(BLOCKS):
            column = (tile.n * BLOCKS + b) * CHUNK
            at = tile.expert, place
            h_column = column * ACT.CHANNEL_STEP
            left = _half_of_block(parts, probs_M1, self.arguments, *at, h_column, h_buffer, b, 0, ACT)
            h_column += CHUNK // 2 * ACT.CHANNEL_STEP
            right = _half_of_block(parts, probs_M1, self.arguments, *at, h_column, h_buffer, b, 1, ACT)
            a_MF = side_by_side(left, right)
            _store_block(a_MF, self.outputs, tile.m, tile.rows, place, column, a_buffer, CONSUMER)


@gluon.jit
def make_block_epilogue(
    bias,
    probs_ptr,
    h_desc,
    a_desc,
    a_scales_ptr,
    F,
    ACT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """The epilogue with its buffers."""
    h_out = shared_tiles(h_desc.dtype, CONSUMERS, ROWS, TILE.BLOCK_N // TILE.SUBTILES)
    a_out = shared_tiles(a_desc.dtype, CONSUMERS, ROWS, CHUNK)
    arguments = (bias[0], bias[1], bias[2], h_desc, F)
    return BlockEpilogue(arguments, probs_ptr, (a_desc, a_scales_ptr, F), h_out, a_out, ACT, TILE)
