"""wgrad of token copies in 8 bits (recipe mxfp8) on Blackwell, warp-specialized: the tiles of `gluon_kernel.py`, in the
same order, added to `dw` in the same way.

A step is a tile of 128 tokens of one expert, `[tiles, 128, C]`; after the last token of an expert they are zeros. Each
column of an operand has a scale for 32 tokens.
"""

from ..warp_specialized.gluon_compat import gl, gluon
from ..warp_specialized.partitions import run
from ..warp_specialized.ring import shared_tiles
from ..warp_specialized.scaled_rows import CHUNK, scale_stages, token_copies
from ..warp_specialized.sm_100 import ROWS
from ..warp_specialized.sm_100_mxfp8 import make_accumulators
from ..warp_specialized.walks import expert_tiles
from .gluon_epilogue import make_epilogue


@gluon.jit(do_not_specialize=["num_experts"])
def grouped_wgrad_mxfp8_kernel(
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
    """`left` `[tiles, 128, N]` and `right` `[tiles, 128, K]` e4m3; scales E8M0, `[tiles, ceil(N / 128), 512]` and
    `[tiles, ceil(K / 128), 512]`; `steps` and `order`: `TokenTiles`; other arguments as in the Triton kernel.
    """
    gl.static_assert(CONSUMERS == 1)
    gl.static_assert(TILE.BLOCK_M == CHUNK)
    gl.static_assert(TILE.BLOCK_N == ROWS)
    STAGES: gl.constexpr = TILE.num_stages
    walk = expert_tiles(order_ptr, steps_ptr, None, 0, num_experts, N, K, True, ACCUMULATE, TILE)
    left_stages = shared_tiles(left_desc.dtype, STAGES, CHUNK, ROWS)
    right_stages = shared_tiles(right_desc.dtype, STAGES, CHUNK, TILE.BLOCK_K)
    left_scales = scale_stages(gl.uint8, STAGES, ROWS)
    right_scales = scale_stages(gl.uint8, STAGES, TILE.BLOCK_K)
    left = token_copies((left_desc, left_scales_desc), left_stages, left_scales, N, 0, 1, False)
    right = token_copies((right_desc, right_scales_desc), right_stages, right_scales, K, 1, 1, False)
    stages, scales = (left_stages, right_stages), (left_scales, right_scales)
    ring, accumulators = make_accumulators(stages, scales, True, TILE.SUBTILES, not ACCUMULATE, TILE)
    dw = (dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k)
    epilogue = make_epilogue(dw, num_experts, ring.full, ACCUMULATE, REVERSED, DW_ALIGNED, CONSUMERS, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
