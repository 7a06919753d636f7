"""Passes (2) and (4) of 8-bit operands (recipe mxfp8) on Blackwell, warp-specialized: the tiles of `gluon_kernel.py`,
in the same order, with the same epilogue.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at
from ..warp_specialized.blackwell import ROWS, read_subtiles, wait_for_accumulator
from ..warp_specialized.gluon_compat import gl, gluon, tma_store_wait
from ..warp_specialized.mxfp8 import CHUNK, load_operands, multiply_tiles, operands, scales_in_tensor_memory
from ..warp_specialized.partitions import worker_registers, worker_warps
from ..warp_specialized.ring import shared_tiles
from .gluon_kernel import BUFFERS, store_rest, store_subtile


@gluon.jit
def _consume(arguments, num_m, num_n, accumulators, out, TILE: gl.constexpr):
    """Partition of the consumer; `out`: its buffers for stores."""
    tiles_ptr = arguments[5]
    SUBTILES: gl.constexpr = TILE.SUBTILES
    for j in range(0, gl.cdiv(num_m * num_n - gl.program_id(0), gl.num_programs(0))):
        m_tile, n_tile = tile_at(gl.program_id(0) + j * gl.num_programs(0), num_m, num_n, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        place = to_ragged_indices(tile[1], tile[2], 0)
        subtiles = read_subtiles(wait_for_accumulator(j, accumulators), 0, SUBTILES)
        for s in gl.static_range(SUBTILES):
            store_subtile(subtiles[s], arguments, tile, place, n_tile, out, s, 0, ROWS, TILE)
    tma_store_wait(0)


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
    gl.static_assert(CONSUMERS == 1)
    gl.static_assert(TILE.BLOCK_M == ROWS)
    gl.static_assert(TILE.BLOCK_K == CHUNK)
    num_m, num_n = gl.load(tiles_ptr), gl.cdiv(N, TILE.BLOCK_N)
    staged = operands(x_desc.dtype, TILE.BLOCK_N, False, TILE.num_stages)
    scales = scales_in_tensor_memory(TILE.BLOCK_N)
    out = shared_tiles(y_desc.dtype, min(BUFFERS, TILE.SUBTILES), ROWS, TILE.BLOCK_N // TILE.SUBTILES)
    arguments = (bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr, y_desc, tiles_ptr, N, K)
    loads = (x_desc, x_scales_desc, w_desc, w_scales_desc, tiles_ptr)
    gl.warp_specialize(
        [
            (_consume, (arguments, num_m, num_n, staged[6], out, TILE)),
            (multiply_tiles, (K, num_m, num_n, staged, scales, TILE)),
            (load_operands, (loads, N, K, num_m, num_n, staged, TILE)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
    store_rest((y_ptr, tiles_ptr, N, stride_y_r), partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows)
