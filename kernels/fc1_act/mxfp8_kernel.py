"""Pass (1) of 8-bit operands (recipe mxfp8) on Blackwell, warp-specialized, which also quantizes the activation: the
partitions of the pass gemm (`warp_specialized/sm_100_mxfp8.py`) with an epilogue of its own.

A thread of the consumer reads 32 neighbouring columns of the activation in one row, which are a block: the columns of
`h` that they come from are in its registers, also where gates and linear channels alternate.
"""

from ..device import activation
from ..device.quantization import along_columns, chunk_of_scales, exponent_of_zeros, store_scales
from ..device.tile_order import zero_padding_at
from ..device.tiles import expert_base, round_to, to_fp32
from ..warp_specialized.gluon_compat import aggregate, gl, gluon, tma_store, value
from ..warp_specialized.partitions import run
from ..warp_specialized.ring import shared_tiles
from ..warp_specialized.scaled_rows import CHUNK
from ..warp_specialized.sm_100 import ROWS
from ..warp_specialized.sm_100_mxfp8 import ragged_operands
from ..warp_specialized.subtiles import (
    WithoutBegin,
    column_numbers,
    load_for_rows,
    overwrite,
    row_numbers,
    whole_rows,
)
from ..warp_specialized.walks import row_tiles
from .epilogue import activate, pre_activation


@gluon.jit
def _store_activation(a_MF, outputs, tile, place, column, buffer, DTYPE: gl.constexpr, RUNNING: gl.constexpr):
    """Multiply columns of the activation by `probs`, round them as `h`, quantize and store them with their scales.

    A bias makes values of rows past the expert's end, which are not stored. Their scales are those of zeros.
    """
    probs_ptr, a_desc, a_scales_ptr, F = outputs
    wrap, end, row = place
    if probs_ptr is not None:
        a_MF *= load_for_rows(probs_ptr + tile.first, a_MF, 0, tile.rows)
    copy, exponent = along_columns(to_fp32(round_to(a_MF, DTYPE)), "mxfp8")
    overwrite(buffer, copy, RUNNING)
    tma_store(a_desc, [wrap, end, row, column], buffer)
    if column < gl.cdiv(F, CHUNK) * CHUNK:
        row_M1 = row_numbers(exponent, 0)[:, None]
        exponent = gl.where(row_M1 < tile.rows, exponent, exponent_of_zeros("mxfp8"))
        block_1B = column_numbers(exponent, column % CHUNK // 32)
        store_scales(chunk_of_scales(a_scales_ptr, tile.m, column, F), exponent, row_M1, block_1B, "mxfp8")


@aggregate
class Epilogue(WithoutBegin):
    """Stores `h`, and quantizes the activation."""

    bias: value  # (pointer, table, stride of experts)
    outputs: value  # of `_store_activation`
    h_desc: value
    num_gates: value
    h_out: value
    a_out: value
    ACT: value
    TILE: value

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Finish and store a tile."""
        ACT: gl.constexpr = self.ACT
        HALVES: gl.constexpr = activation.halves(ACT)
        OF_HALF: gl.constexpr = self.TILE.SUBTILES // ACT.CHANNEL_STEP // HALVES
        h_out, buffer = self.h_out, self.a_out.index(0)
        place = tile.place(0)
        wrap, end, row = place
        bias = None
        if self.bias[0] is not None:
            bias = expert_base(self.bias[0], self.bias[1], self.bias[2], tile.expert)
        subtiles = accumulators.finish(acc, i)
        for s in gl.static_range(OF_HALF):
            h_MG, l_MF = subtiles[s], subtiles[(HALVES - 1) * OF_HALF + s]
            column = tile.n * (self.TILE.BLOCK_N // HALVES) + s * h_out.shape[2]
            column_1G = column_numbers(h_MG, column)
            h_MG, l_MF = pre_activation(h_MG, l_MF, bias, column_1G, self.num_gates, ACT, h_out.dtype)
            overwrite(h_out.index(0), h_MG, HALVES)
            if HALVES == 2:
                tma_store(self.h_desc, [wrap, end, row, 0, column], h_out.index(0))
                overwrite(h_out.index(1), l_MF, HALVES)
                tma_store(self.h_desc, [wrap, end, row, 1, column], h_out.index(1))
            else:
                tma_store(self.h_desc, [wrap, end, row, column], h_out.index(0))
            a_MF, a_column = activate(h_MG, l_MF, ACT), column // ACT.CHANNEL_STEP
            _store_activation(a_MF, self.outputs, tile, place, a_column, buffer, h_out.dtype, HALVES)


@gluon.jit
def grouped_fc1_act_mxfp8_kernel(
    x_desc,
    x_scales_desc,
    w_desc,
    w_scales_desc,
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
    G]`; `a` and its scales: a row copy of act * probs, `[R, F]`, with F a multiple of 32, or of 128 if rows of `h` have
    two halves.
    """
    gl.static_assert(CONSUMERS == 1)
    HALVES: gl.constexpr = activation.halves(ACT)
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    G = HALVES * F * ACT.CHANNEL_STEP
    walk = row_tiles(tiles_ptr, G, H, TILE)
    x, w = (x_desc, x_scales_desc), (w_desc, w_scales_desc)
    left, right, ring, accumulators = ragged_operands(x, w, G, HALVES, TILE.SUBTILES // ACT.CHANNEL_STEP, TILE)
    h_out = shared_tiles(h_desc.dtype, HALVES, ROWS, WIDTH * ACT.CHANNEL_STEP)
    a_out = shared_tiles(a_desc.dtype, 1, ROWS, WIDTH)
    bias, outputs = (bias_ptr, bias_table_ptr, stride_bias_e), (probs_ptr, a_desc, a_scales_ptr, F)
    epilogue = Epilogue(bias, outputs, h_desc, F * ACT.CHANNEL_STEP, h_out, a_out, ACT, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
    row_M1, column_1N = whole_rows(ROWS)
    zero_padding_at(h_ptr, tiles_ptr, G, stride_h_r, 1, row_M1, column_1N)
