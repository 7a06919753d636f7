"""Pass (1), warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`, by the partitions of `warp_specialized/partitions.py`, which multiply both channels of a tile's
columns.

While `h` and `a` are stored, the next tile's operands arrive, and MMAs go on: those of the other warpgroup on Hopper,
into the other accumulator on Blackwell. No barrier covers the whole block. The halves of `h`, and then `a`, are stored
from buffers in turn: each consumer has HALVES + 1.
"""

from ..device import activation
from ..device.tile_order import zero_padding_at
from ..device.tiles import expert_base
from ..warp_specialized.gluon_compat import aggregate, gl, gluon, tma_store, value
from ..warp_specialized.partitions import ragged_operands, run
from ..warp_specialized.ring import shared_tiles
from ..warp_specialized.subtiles import WithoutBegin, column_numbers, load_for_rows, overwrite, whole_rows
from ..warp_specialized.walks import row_tiles
from .epilogue import activate, pre_activation


@aggregate
class Epilogue(WithoutBegin):
    """Adds the bias, stores `h`, and stores the activation times `probs`."""

    bias: value  # (pointer, table, stride of experts)
    probs_ptr: value
    h_desc: value
    a_desc: value
    F: value
    h_out: value
    a_out: value
    ROWS: gl.constexpr  # of a consumer
    ACT: value
    TILE: value

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Finish and store a consumer's part of a tile."""
        ACT: gl.constexpr = self.ACT
        SUBTILES: gl.constexpr = self.TILE.SUBTILES
        HALVES: gl.constexpr = activation.halves(ACT)
        NUM_SUBTILES: gl.constexpr = HALVES * SUBTILES
        h_out = self.h_out
        wrap, end, row = tile.place(CONSUMER * self.ROWS)
        subtiles = accumulators.finish(acc, i)
        for s in gl.static_range(SUBTILES):
            column = tile.n * self.TILE.BLOCK_N + s * (self.TILE.BLOCK_N // SUBTILES)
            h_MG = accumulators.subtile(subtiles, s, NUM_SUBTILES, tile)
            l_MF = accumulators.subtile(subtiles, SUBTILES + s, NUM_SUBTILES, tile) if HALVES == 2 else h_MG
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
            overwrite(self.a_out.index(CONSUMER), a.to(self.a_out.dtype), HALVES)
            tma_store(self.a_desc, [wrap, end, row, column], self.a_out.index(CONSUMER))


@gluon.jit
def grouped_fc1_act_warp_specialized_kernel(
    x_desc,
    x_ptr,
    row_ids_ptr,
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
    """Pass (1); arguments as in the Triton kernel. `x` has a descriptor, or a pointer if threads gather its rows."""
    gl.static_assert(TILE.BLOCK_M == 128)
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    HALVES: gl.constexpr = activation.halves(ACT)
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    COLUMNS: gl.constexpr = HALVES * TILE.BLOCK_N * ACT.CHANNEL_STEP
    walk = row_tiles(tiles_ptr, F, H, TILE)
    gather, weights = (x_ptr, stride_x_r, row_ids_ptr, H), (w_desc, num_experts)
    left, right, ring, accumulators = ragged_operands(
        x_desc, gather, weights, REVERSED, K_CONTIGUOUS, HALVES, COLUMNS, CONSUMERS, 0, TILE
    )
    h_out = shared_tiles(h_desc.dtype, CONSUMERS * HALVES, ROWS, WIDTH * ACT.CHANNEL_STEP)
    a_out = shared_tiles(a_desc.dtype, CONSUMERS, ROWS, WIDTH)
    bias = (bias_ptr, bias_table_ptr, stride_bias_e)
    epilogue = Epilogue(bias, probs_ptr, h_desc, a_desc, F, h_out, a_out, ROWS, ACT, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
    row_M1, column_1N = whole_rows(TILE.BLOCK_M)
    zero_padding_at(h_ptr, tiles_ptr, 2 * F if ACT.GATED else F, stride_h_r, 1, row_M1, column_1N)
    zero_padding_at(a_ptr, tiles_ptr, F, stride_a_r, 1, row_M1, column_1N)
