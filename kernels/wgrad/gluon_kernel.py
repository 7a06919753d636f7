"""wgrad, warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`, by the partitions of `warp_specialized/partitions.py`.

While a finished tile is added to `dw` (`gluon_epilogue.py`), the next one's operands arrive, and MMAs go on: those of
the other warpgroup on Hopper, into the other accumulator on Blackwell. No barrier covers the whole block.
"""

from ..warp_specialized.gluon_compat import gl, gluon
from ..warp_specialized.partitions import ring_and_accumulators, run
from ..warp_specialized.ring import shared_tiles
from ..warp_specialized.rows import rows_operand
from ..warp_specialized.walks import expert_tiles
from .gluon_epilogue import make_ahead_epilogue, make_epilogue


@gluon.jit(do_not_specialize=["num_segments", "num_experts"])
def grouped_wgrad_warp_specialized_kernel(
    left_desc,
    left_ptr,
    left_row_ids_ptr,
    right_desc,
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
    """
    STAGES: gl.constexpr = TILE.num_stages
    LISTED: gl.constexpr = steps_ptr is not None
    DTYPE: gl.constexpr = left_ptr.dtype.element_ty if left_desc is None else left_desc.dtype
    GATHERED: gl.constexpr = (left_row_ids_ptr is not None) or (right_row_ids_ptr is not None)
    tables = (order_ptr, steps_ptr if LISTED else offsets_ptr, segments_ptr, num_segments, num_experts)
    walk = expert_tiles(*tables, N, K, LISTED, ACCUMULATE, TILE)
    left_stages = shared_tiles(DTYPE, STAGES * CONSUMERS, TILE.BLOCK_M, TILE.BLOCK_N // CONSUMERS)
    right_stages = shared_tiles(DTYPE, STAGES, TILE.BLOCK_M, TILE.BLOCK_K)
    left = rows_operand(left_desc, (left_ptr, stride_left_r, left_row_ids_ptr, N), left_stages, 0, CONSUMERS, True)
    right = rows_operand(right_desc, (right_ptr, stride_right_r, right_row_ids_ptr, K), right_stages, 1, 1, True)
    ring, accumulators = ring_and_accumulators(
        left_stages, right_stages, True, False, TILE.BLOCK_K, CONSUMERS, GATHERED, 0, STAGES
    )
    if TILE.SLOTS:
        epilogue = make_ahead_epilogue(dw_desc, num_experts, REVERSED, CONSUMERS, TILE)
    else:
        dw = (dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k)
        epilogue = make_epilogue(dw, num_experts, ring.full, ACCUMULATE, REVERSED, DW_ALIGNED, CONSUMERS, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
