"""Pass (1), warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`, by the partitions of `warp_specialized/partitions.py`, which multiply both channels of a tile's
columns.

While `h` and `a` are stored, the next tile's operands arrive, and MMAs go on: those of the other warpgroup on Hopper,
into the other accumulator on Blackwell. No barrier covers the whole block. The halves of `h`, and then `a`, are stored
from buffers in turn: each consumer has HALVES + 1.

In 8 bits the activation is quantized, too. Recipe fp8_block, on Hopper, has `fp8_block_epilogue.py`. Recipe mxfp8, on
Blackwell: a thread of the consumer reads 32 neighbouring columns of the activation in one row, which are a block: the
columns of `h` that they come from are in its registers, also where gates and linear channels alternate.
"""

from ..device import activation
from ..device.quantization import along_columns, chunk_of_scales, exponent_of_zeros, store_scales
from ..device.tile_order import zero_padding_at
from ..device.tiles import expert_base, round_to, to_fp32
from ..warp_specialized.gluon_compat import aggregate, gl, gluon, named, tma_store, value
from ..warp_specialized.partitions import ragged_operands, run
from ..warp_specialized.ring import shared_tiles
from ..warp_specialized.scaled_rows import CHUNK
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
from .fp8_block_epilogue import make_block_epilogue


@aggregate
class Epilogue(WithoutBegin):
    """Adds the bias, stores `h`, and stores the activation times `probs`, in mxfp8 with its scales."""

    bias: value  # (pointer, table, stride of experts)
    probs_ptr: value
    h_desc: value
    a_desc: value
    a_scales_ptr: value
    F: value
    h_out: value
    a_out: value
    ROWS: gl.constexpr  # of a consumer
    COLUMNS: gl.constexpr  # of the activation in a tile
    ACT: value

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Finish and store a consumer's part of a tile."""
        ACT: gl.constexpr = self.ACT
        HALVES: gl.constexpr = activation.halves(ACT)
        WIDTH: gl.constexpr = self.a_out.shape[2]
        COLUMNS: gl.constexpr = self.COLUMNS
        SUBTILES: gl.constexpr = COLUMNS // WIDTH
        h_out = self.h_out
        wrap, end, row = tile.place(CONSUMER * self.ROWS)
        subtiles = accumulators.finish(acc, i, HALVES * SUBTILES)
        for s in gl.static_range(SUBTILES):
            column = tile.n * COLUMNS + s * WIDTH
            h_MG = accumulators.subtile(subtiles, s, HALVES * SUBTILES, tile)
            l_MF = accumulators.subtile(subtiles, SUBTILES + s, HALVES * SUBTILES, tile) if HALVES == 2 else h_MG
            bias = None
            if self.bias[0] is not None:
                bias = expert_base(self.bias[0], self.bias[1], self.bias[2], tile.expert)
            column_1G = column_numbers(h_MG, column * ACT.CHANNEL_STEP)
            h_MG, l_MF = pre_activation(h_MG, l_MF, bias, column_1G, self.F * ACT.CHANNEL_STEP, ACT, h_out.dtype)
            buffer = h_out.index(CONSUMER * HALVES)
            overwrite(buffer, h_MG, HALVES)
            if HALVES == 2:
                tma_store(self.h_desc, [wrap, end, row, 0, column], buffer)
                overwrite(h_out.index(CONSUMER * HALVES + 1), l_MF, HALVES)
                tma_store(self.h_desc, [wrap, end, row, 1, column], h_out.index(CONSUMER * HALVES + 1))
            else:
                tma_store(self.h_desc, [wrap, end, row, column * ACT.CHANNEL_STEP], buffer)
            a = activate(h_MG, l_MF, ACT)
            if self.probs_ptr is not None:
                a *= load_for_rows(self.probs_ptr + tile.first, a, CONSUMER * self.ROWS, tile.rows)
            if self.a_scales_ptr is not None:
                a, exponent = along_columns(to_fp32(round_to(a, h_out.dtype)), "mxfp8")
            overwrite(self.a_out.index(CONSUMER), a.to(self.a_out.dtype), HALVES)
            tma_store(self.a_desc, [wrap, end, row, column], self.a_out.index(CONSUMER))
            if self.a_scales_ptr is not None:
                self._store_scales(exponent, tile, column)

    @gluon.jit
    def _store_scales(self, exponent, tile, column):
        """Store scales of a subtile of the activation. A bias makes values of rows past the expert's end, which are not
        stored: their scales are those of zeros.
        """
        if column < gl.cdiv(self.F, CHUNK) * CHUNK:
            row_M1 = row_numbers(exponent, 0)[:, None]
            exponent = gl.where(row_M1 < tile.rows, exponent, exponent_of_zeros("mxfp8"))
            block_1B = column_numbers(exponent, column % CHUNK // 32)
            scales_ptr = chunk_of_scales(self.a_scales_ptr, tile.m, column, self.F)
            store_scales(scales_ptr, exponent, row_M1, block_1B, "mxfp8")


@gluon.jit(repr=named("fc1_act", "x_scales_desc"))
def grouped_fc1_act_warp_specialized_kernel(
    x_desc,
    x_ptr,
    x_scales_desc,
    row_ids_ptr,
    w_desc,
    w_scales,
    t_ptr,
    t_desc,
    b_desc,
    bias_ptr,
    bias_table_ptr,
    probs_ptr,
    h_ptr,
    h_desc,
    a_ptr,
    a_desc,
    a_scales_ptr,
    tiles_ptr,
    num_experts,
    H,
    F,
    rank,
    stride_x_r,
    stride_bias_e,
    stride_h_r,
    stride_a_r,
    ACT: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Pass (1); arguments as in the Triton kernel. `x` has a descriptor, or a pointer if threads gather its rows.

    In 8 bits, a tile has BLOCK_N channels of `h`. `x` `[R, H]` and `w` `[E, G, H]` are e4m3, with scales as in the pass
    gemm; `a` and its scales are a row copy of act * probs, `[R, F]`, with F a multiple of 32 (mxfp8) or, if rows of `h`
    have two halves or in fp8_block, of 128.
    """
    gl.static_assert(TILE.BLOCK_M == 128)
    EIGHT_BIT: gl.constexpr = x_scales_desc is not None
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    HALVES: gl.constexpr = activation.halves(ACT)
    CHANNELS: gl.constexpr = HALVES * ACT.CHANNEL_STEP  # of `h` for one of the activation
    COLUMNS: gl.constexpr = TILE.BLOCK_N // CHANNELS if EIGHT_BIT else TILE.BLOCK_N
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    G = CHANNELS * F
    walk = row_tiles(tiles_ptr, G if EIGHT_BIT else F, H, TILE, EIGHT_BIT and CONSUMERS == 2, rank)
    x, w = (x_desc, x_scales_desc, (x_ptr, stride_x_r, row_ids_ptr, H)), (w_desc, w_scales, num_experts, G)
    adapter = (t_ptr, t_desc, b_desc, rank)
    left, right, ring, accumulators = ragged_operands(
        x, w, adapter, REVERSED, K_CONTIGUOUS, HALVES, COLUMNS * CHANNELS, CONSUMERS, 0, TILE
    )
    bias = (bias_ptr, bias_table_ptr, stride_bias_e)
    if EIGHT_BIT and CONSUMERS == 2:
        epilogue = make_block_epilogue(bias, probs_ptr, h_desc, a_desc, a_scales_ptr, F, ACT, CONSUMERS, TILE)
    else:
        h_out = shared_tiles(h_desc.dtype, CONSUMERS * HALVES, ROWS, WIDTH * ACT.CHANNEL_STEP)
        a_out = shared_tiles(a_desc.dtype, CONSUMERS, ROWS, WIDTH)
        outputs = (h_desc, a_desc, a_scales_ptr, F, h_out, a_out)
        epilogue = Epilogue(bias, probs_ptr, *outputs, ROWS, COLUMNS, ACT)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
    row_M1, column_1N = whole_rows(TILE.BLOCK_M)
    zero_padding_at(h_ptr, tiles_ptr, G, stride_h_r, 1, row_M1, column_1N)
    if not EIGHT_BIT:
        zero_padding_at(a_ptr, tiles_ptr, F, stride_a_r, 1, row_M1, column_1N)
