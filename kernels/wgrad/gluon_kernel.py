"""wgrad, warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`, by the partitions of `warp_specialized/partitions.py`.

While a finished tile is added to `dw` (`gluon_epilogue.py`), the next one's operands arrive, and MMAs go on: those of
the other warpgroup on Hopper, into the other accumulator on Blackwell. No barrier covers the whole block.

In 8 bits, a step is a tile of 128 tokens of one expert: of token copies, which are zeros after the expert's last token.
Recipe fp8_block, on Hopper: the tokens of a column are contiguous, as `wgmma` needs them in 8 bits, and have one scale.
Recipe mxfp8, on Blackwell: each column has a scale for 32 tokens.
"""

from ..warp_specialized.gluon_compat import fence_async_shared, gl, gluon, named
from ..warp_specialized.partitions import copiers, make_accumulators, run
from ..warp_specialized.ring import make_ring, shared_tiles
from ..warp_specialized.rows import rows_operand
from ..warp_specialized.scaled_rows import CHUNK, scale_stages, token_copies
from ..warp_specialized.sm_90_fp8 import ColumnScaled
from ..warp_specialized.sm_100_mxfp8 import make_accumulators as make_mxfp8_accumulators
from ..warp_specialized.walks import expert_tiles
from .gluon_epilogue import make_ahead_epilogue, make_epilogue


@gluon.jit(do_not_specialize=["num_segments", "num_experts"], repr=named("wgrad", "left_scales_desc"))
def grouped_wgrad_warp_specialized_kernel(
    left_desc,
    left_scales_desc,
    left_ptr,
    left_row_ids_ptr,
    right_desc,
    right_scales_desc,
    right_ptr,
    right_row_ids_ptr,
    dw_ptr,
    dw_table_ptr,
    dw_desc,
    offsets_ptr,
    segments_ptr,
    steps_ptr,
    order_ptr,
    num_segments,
    num_experts,
    N,
    K,
    stride_left_r,
    stride_right_r,
    stride_dw_e,
    stride_dw_n,
    stride_dw_k,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,  # dw_desc starts at the last expert
    DW_ALIGNED: gl.constexpr,  # every expert's address is a multiple of 16 bytes
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Passes (5) and (6) without biases; arguments as in the Triton kernel. An operand has a descriptor, or a pointer
    if threads gather its rows. With `TILE.SLOTS`, `dw` is loaded ahead, and its descriptor is that of `AheadEpilogue`.

    In 8 bits, `left` is e4m3, `[tiles, N, 128]` with scales `[tiles, ceil(N / 128), 128]` fp32 (fp8_block), or `[tiles,
    128, N]` with scales `[tiles, ceil(N / 128), 512]` E8M0 (mxfp8); so is `right`, with K; `steps` and `order`:
    `TokenTiles`.
    """
    STAGES: gl.constexpr = TILE.num_stages
    LISTED: gl.constexpr = steps_ptr is not None
    DTYPE: gl.constexpr = left_ptr.dtype.element_ty if left_desc is None else left_desc.dtype
    GATHERED: gl.constexpr = (left_row_ids_ptr is not None) or (right_row_ids_ptr is not None)
    BY_COLUMN: gl.constexpr = (left_scales_desc is not None) and CONSUMERS == 2
    tables = (order_ptr, steps_ptr if LISTED else offsets_ptr, segments_ptr, num_segments, num_experts)
    walk = expert_tiles(*tables, N, K, LISTED, ACCUMULATE, TILE)
    left_stages = shared_tiles(DTYPE, STAGES * CONSUMERS, TILE.BLOCK_M, TILE.BLOCK_N // CONSUMERS, BY_COLUMN)
    right_stages = shared_tiles(DTYPE, STAGES, TILE.BLOCK_M, TILE.BLOCK_K, BY_COLUMN)
    ring = make_ring(STAGES, CONSUMERS, copiers(CONSUMERS, GATHERED))
    if left_scales_desc is None:
        left = rows_operand(left_desc, (left_ptr, stride_left_r, left_row_ids_ptr, N), left_stages, 0, CONSUMERS, True)
        right = rows_operand(right_desc, (right_ptr, stride_right_r, right_row_ids_ptr, K), right_stages, 1, 1, True)
        accumulators = make_accumulators(left_stages, right_stages, ring, True, False, TILE.BLOCK_K, CONSUMERS)
    else:
        gl.static_assert(TILE.BLOCK_M == CHUNK)
        left_scales = scale_stages(left_scales_desc.dtype, STAGES, TILE.BLOCK_N)
        right_scales = scale_stages(left_scales_desc.dtype, STAGES, TILE.BLOCK_K)
        left = token_copies((left_desc, left_scales_desc), left_stages, left_scales, N, 0, CONSUMERS, BY_COLUMN)
        right = token_copies((right_desc, right_scales_desc), right_stages, right_scales, K, 1, 1, BY_COLUMN)
        stages = (left_stages, right_stages, left_scales, right_scales)
        if BY_COLUMN:
            accumulators = ColumnScaled(*stages, ring)
        else:
            accumulators = make_mxfp8_accumulators(*stages, ring, True, not ACCUMULATE)
    fence_async_shared()
    if TILE.SLOTS:
        epilogue = make_ahead_epilogue(dw_desc, num_experts, REVERSED, CONSUMERS, TILE)
    else:
        dw = (dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k)
        epilogue = make_epilogue(dw, num_experts, ring.full, ACCUMULATE, REVERSED, DW_ALIGNED, CONSUMERS, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
