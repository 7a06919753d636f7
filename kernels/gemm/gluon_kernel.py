"""Passes (2) and (4), warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`, by the partitions of `warp_specialized/partitions.py`. Also of operands in 8 bits: recipe fp8_block
on Hopper, mxfp8 on Blackwell.

While a finished tile is stored, the next one's operands arrive, and MMAs go on: those of the other warpgroup on Hopper,
into the other accumulator on Blackwell. No barrier covers the whole block.
"""

from ..device.tile_order import zero_padding_at
from ..device.tiles import expert_base, load_bias
from ..warp_specialized.gluon_compat import aggregate, gl, gluon, named, tma_store, value
from ..warp_specialized.partitions import ragged_operands, run
from ..warp_specialized.ring import shared_tiles
from ..warp_specialized.subtiles import WithoutBegin, column_numbers, load_for_rows, overwrite, whole_rows
from ..warp_specialized.walks import row_tiles
from .dprobs import sum_partials
from .epilogue import add_bias

# Upper bound on a consumer's buffers for subtiles that are being stored; the number of subtiles is a power of two.
BUFFERS = gl.constexpr(2)


@aggregate
class Epilogue(WithoutBegin):
    """Adds the bias, and stores subtiles through a consumer's buffers in turn."""

    bias: value  # (pointer, table, stride of experts)
    scale_ptr: value
    y_desc: value
    N: value
    out: value
    ROWS: gl.constexpr  # of a consumer
    TILE: value

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Finish and store a consumer's part of a tile."""
        SUBTILES: gl.constexpr = self.TILE.SUBTILES
        TURNS: gl.constexpr = min(BUFFERS, SUBTILES)
        wrap, end, row = tile.place(CONSUMER * self.ROWS)
        subtiles = accumulators.finish(acc, i, SUBTILES)
        for s in gl.static_range(SUBTILES):
            y_MN = accumulators.subtile(subtiles, s, SUBTILES, tile)
            column = tile.n * self.TILE.BLOCK_N + s * (self.TILE.BLOCK_N // SUBTILES)
            bias_1N, scale_M1 = None, None
            if self.bias[0] is not None:
                bias = expert_base(self.bias[0], self.bias[1], self.bias[2], tile.expert)
                bias_1N = load_bias(bias, column_numbers(y_MN, column), self.N)
                if self.scale_ptr is not None:
                    scale_M1 = load_for_rows(self.scale_ptr + tile.first, y_MN, CONSUMER * self.ROWS, tile.rows)
            y_MN = add_bias(y_MN, bias_1N, scale_M1, self.out.dtype)
            buffer = self.out.index(CONSUMER * TURNS + s % TURNS)
            overwrite(buffer, y_MN, TURNS - 1)
            tma_store(self.y_desc, [wrap, end, row, column], buffer)


@gluon.jit(do_not_specialize=["num_partials", "num_rows"], repr=named("gemm", "x_scales_desc"))
def grouped_gemm_warp_specialized_kernel(
    x_desc,
    x_scales_desc,
    w_desc,
    w_scales,
    t_ptr,
    t_desc,
    b_desc,
    bias_ptr,
    bias_table_ptr,
    scale_ptr,
    y_ptr,
    y_desc,
    partial_ptr,
    dprobs_rows_ptr,
    dprobs_ptr,
    tiles_ptr,
    num_partials,
    num_rows,
    num_experts,
    N,
    K,
    rank,
    stride_bias_e,
    stride_y_r,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Passes (2) and (4); arguments as in the Triton kernel. In 8 bits, `x` `[R, K]` and `w` `[E, N, K]` are e4m3, with
    scales in fp32 or E8M0: of `x` `[tiles, ceil(K / 128), 128]` or `[tiles, ceil(K / 128), 512]`, of `w` by a pointer
    `[E, ceil(N / 128), ceil(K / 128)]` or by a descriptor `[E, ceil(K / 128), ceil(N / 128), 512]`.
    """
    gl.static_assert(TILE.BLOCK_M == 128)
    EARLY: gl.constexpr = (x_scales_desc is not None) and CONSUMERS == 2  # scales of weights depend on the tile
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    walk = row_tiles(tiles_ptr, N, K, TILE, EARLY, rank)
    x, w = (x_desc, x_scales_desc, (None, None, None, K)), (w_desc, w_scales, num_experts, N)
    adapter = (t_ptr, t_desc, b_desc, rank)
    left, right, ring, accumulators = ragged_operands(
        x, w, adapter, REVERSED, K_CONTIGUOUS, 1, TILE.BLOCK_N, CONSUMERS, 0, TILE
    )
    COUNT: gl.constexpr = CONSUMERS * min(BUFFERS, TILE.SUBTILES)
    out = shared_tiles(y_desc.dtype, COUNT, ROWS, TILE.BLOCK_N // TILE.SUBTILES)
    epilogue = Epilogue((bias_ptr, bias_table_ptr, stride_bias_e), scale_ptr, y_desc, N, out, ROWS, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
    row_M1, column_1N = whole_rows(TILE.BLOCK_M)
    zero_padding_at(y_ptr, tiles_ptr, N, stride_y_r, 1, row_M1, column_1N)
    if partial_ptr is not None:
        indices = gl.arange(0, 256, gl.BlockedLayout([8 // gl.num_warps()], [32], [gl.num_warps()], [0]))
        sum_partials(partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows, indices)
