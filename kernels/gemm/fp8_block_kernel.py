"""Passes (2) and (4) of 8-bit operands (recipe fp8_block) on Hopper, warp-specialized: the tiles of `gluon_kernel.py`,
in the same order, with the same epilogue.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at
from ..device.tiles import column_subtiles
from ..warp_specialized.fp8_block import load_operands, operands, product
from ..warp_specialized.gluon_compat import gl, gluon, tma_store_wait
from ..warp_specialized.hopper import ROWS
from ..warp_specialized.partitions import worker_registers, worker_warps
from ..warp_specialized.ring import shared_tiles
from .gluon_kernel import BUFFERS, store_rest, store_subtile


@gluon.jit
def _consume(arguments, w_scales_ptr, pipeline, out, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """Partition of a consumer; `out`: its buffers for stores."""
    tiles_ptr, N, K = arguments[5], arguments[6], arguments[7]
    num_m, num_n = pipeline[0], pipeline[1]
    SUBTILES: gl.constexpr = TILE.SUBTILES
    EACH: gl.constexpr = SUBTILES // 2  # subtiles of a part
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        place = to_ragged_indices(tile[1], tile[2], CONSUMER * ROWS)
        parts, i = product(i, tile[0], n_tile, N, K, w_scales_ptr, pipeline, CONSUMER, TILE)
        for s in gl.static_range(SUBTILES):
            y_MN = column_subtiles(parts[s // EACH], EACH)[s % EACH]
            store_subtile(y_MN, arguments, tile, place, n_tile, out, s, CONSUMER, ROWS, TILE)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_partials", "num_rows"])
def grouped_gemm_fp8_block_kernel(
    x_desc,
    x_scales_desc,
    w_desc,
    w_scales_ptr,
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
    """`x` `[R, K]` and `w` `[E, N, K]` e4m3; `x_scales` `[tiles, ceil(K / 128), 128]` and `w_scales` `[E, ceil(N /
    128), ceil(K / 128)]` fp32; other arguments as in the Triton kernel.
    """
    x, w, scales, full, empty = operands(x_desc.dtype, TILE)
    pipeline = (gl.load(tiles_ptr), gl.cdiv(N, TILE.BLOCK_N), x, w, scales, full, empty)
    out = shared_tiles(y_desc.dtype, CONSUMERS * min(BUFFERS, TILE.SUBTILES), ROWS, TILE.BLOCK_N // TILE.SUBTILES)
    arguments = (bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr, y_desc, tiles_ptr, N, K)
    loads = (x_desc, x_scales_desc, w_desc, tiles_ptr)
    gl.warp_specialize(
        [
            (_consume, (arguments, w_scales_ptr, pipeline, out, gl.constexpr(0), TILE)),
            (_consume, (arguments, w_scales_ptr, pipeline, out, gl.constexpr(1), TILE)),
            (load_operands, (loads, K, pipeline, TILE)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
    store_rest((y_ptr, tiles_ptr, N, stride_y_r), partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows)
