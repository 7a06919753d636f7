"""Passes (2) and (4) of 8-bit operands (recipe mxfp8) on Blackwell, warp-specialized: the tiles of `gluon_kernel.py`,
in the same order, with the same epilogue.
"""

from ..warp_specialized.gluon_compat import gl, gluon
from ..warp_specialized.partitions import run
from ..warp_specialized.sm_100_mxfp8 import ragged_operands
from ..warp_specialized.walks import row_tiles
from .gluon_kernel import make_epilogue, store_rest


@gluon.jit(do_not_specialize=["num_partials", "num_rows"])
def grouped_gemm_mxfp8_kernel(
    x_desc,
    x_scales_desc,
    w_desc,
    w_scales_desc,
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
    N,
    K,
    stride_bias_e,
    stride_y_r,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`x` `[R, K]` and `w` `[E, N, K]` e4m3; scales E8M0, `[tiles, ceil(K / 128), 512]` of `x` and `[E, ceil(K / 128),
    ceil(N / 128), 512]` of `w`; other arguments as in the Triton kernel.
    """
    walk = row_tiles(tiles_ptr, N, K, TILE)
    x, w = (x_desc, x_scales_desc), (w_desc, w_scales_desc)
    left, right, ring, accumulators = ragged_operands(x, w, N, 1, TILE.SUBTILES, TILE)
    epilogue = make_epilogue((bias_ptr, bias_table_ptr, stride_bias_e), scale_ptr, y_desc, N, CONSUMERS, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS)
    store_rest((y_ptr, tiles_ptr, N, stride_y_r), (partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows))
