"""wgrad of token copies in 8 bits (recipe fp8_block) on Hopper, warp-specialized: the tiles of `gluon_kernel.py`, in
the same order, added to `dw` in the same way.

A step is a tile of 128 tokens of one expert. Both operands are transposed, `[tiles, C, 128]`, so that the tokens are
contiguous, as `wgmma` needs them in 8 bits; after the last token of an expert they are zeros. Each column of an
operand has a scale in every tile, so sums of a step are multiplied by the product of two vectors.
"""

from ..warp_specialized.gluon_compat import aggregate, fence_async_shared, gl, gluon, value
from ..warp_specialized.partitions import run
from ..warp_specialized.ring import make_ring, shared_tiles
from ..warp_specialized.scaled_rows import CHUNK, scale_stages, token_copies
from ..warp_specialized.sm_90 import ROWS
from ..warp_specialized.sm_90_fp8 import Parts, multiply_step, promote, zeros
from ..warp_specialized.walks import expert_tiles
from .gluon_epilogue import make_epilogue


@aggregate
class Accumulators(Parts):
    """Products of token copies, in two parts of a tile's columns."""

    left: value  # stages
    right: value
    left_scales: value
    right_scales: value
    ring: value

    @gluon.jit
    def multiply(self, turn, i, tile, steps, CONSUMER: gl.constexpr):
        """`(both parts, next i)` for a consumer's rows of a tile; i counts steps."""
        parts = (zeros(), zeros())
        layout: gl.constexpr = parts[0].type.layout
        for _ in range(0, steps):
            stage = self.ring.wait(i)
            left_NR, right_KR = self.left.index(stage * 2 + CONSUMER), self.right.index(stage)
            scale_N = self.left_scales.index(stage).slice(CONSUMER * ROWS, ROWS).load(gl.SliceLayout(1, layout))
            scales_K = self.right_scales.index(stage)
            sums = multiply_step(left_NR, right_KR.slice(0, CHUNK))
            low = promote(parts[0], sums, scale_N, scales_K.slice(0, CHUNK).load(gl.SliceLayout(0, layout)))
            self.ring.wait(i)  # as in `sm_90_fp8.Accumulators`
            sums = multiply_step(left_NR, right_KR.slice(CHUNK, CHUNK))
            scale_K = scales_K.slice(CHUNK, CHUNK).load(gl.SliceLayout(0, layout))
            parts = (low, promote(parts[1], sums, scale_N, scale_K))
            self.ring.release(stage)
            i += 1
        return parts, i


@gluon.jit(do_not_specialize=["num_experts"])
def grouped_wgrad_fp8_block_kernel(
    left_desc,
    left_scales_desc,
    right_desc,
    right_scales_desc,
    dw_ptr,
    dw_table_ptr,
    dw_desc,
    steps_ptr,
    order_ptr,
    num_experts,
    N,
    K,
    stride_dw_e,
    stride_dw_n,
    stride_dw_k,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,  # dw_desc starts at the last expert
    DW_ALIGNED: gl.constexpr,  # every expert's address is a multiple of 16 bytes
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`left` `[tiles, N, 128]` and `right` `[tiles, K, 128]` e4m3; scales `[tiles, ceil(N / 128), 128]` and `[tiles,
    ceil(K / 128), 128]` fp32; `steps` and `order`: `TokenTiles`; other arguments as in the Triton kernel.
    """
    gl.static_assert((TILE.BLOCK_M == CHUNK) and (TILE.BLOCK_K == 2 * CHUNK))
    gl.static_assert(TILE.BLOCK_N == CONSUMERS * ROWS)
    STAGES: gl.constexpr = TILE.num_stages
    walk = expert_tiles(order_ptr, steps_ptr, None, 0, num_experts, N, K, True, ACCUMULATE, TILE)
    left_stages = shared_tiles(left_desc.dtype, STAGES * CONSUMERS, ROWS, CHUNK)
    right_stages = shared_tiles(right_desc.dtype, STAGES, TILE.BLOCK_K, CHUNK)
    left_scales = scale_stages(gl.float32, STAGES, TILE.BLOCK_N)
    right_scales = scale_stages(gl.float32, STAGES, TILE.BLOCK_K)
    ring = make_ring(STAGES, CONSUMERS)
    fence_async_shared()
    left = token_copies((left_desc, left_scales_desc), left_stages, left_scales, N, 0, CONSUMERS, True)
    right = token_copies((right_desc, right_scales_desc), right_stages, right_scales, K, 1, 1, True)
    accumulators = Accumulators(left_stages, right_stages, left_scales, right_scales, ring)
    dw = (dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k)
    epilogue = make_epilogue(dw, num_experts, ring.full, ACCUMULATE, REVERSED, DW_ALIGNED, CONSUMERS, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
