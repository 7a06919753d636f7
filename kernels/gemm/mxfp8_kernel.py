"""Passes (2) and (4) of 8-bit operands (recipe mxfp8) on Blackwell, warp-specialized: the tiles of `gluon_kernel.py`,
in the same order, with the same epilogue.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at
from ..warp_specialized.blackwell import ROWS, read_subtiles, wait_for_accumulator
from ..warp_specialized.gluon_compat import gl, gluon, tma_load, tma_store_wait
from ..warp_specialized.mxfp8 import CHUNK, LINES, multiply_tile, operands, scales_in_tensor_memory
from ..warp_specialized.partitions import worker_registers, worker_warps
from ..warp_specialized.ring import begin_loads, shared_tiles
from .gluon_kernel import BUFFERS, store_rest, store_subtile


@gluon.jit
def _load(arguments, N, K, num_m, num_n, operands, TILE: gl.constexpr):
    """Partition of the producer: for each step, load rows of `x`, columns of `w`, and the scales of both."""
    x_desc, x_scales_desc, w_desc, w_scales_desc, tiles_ptr = arguments
    x, w, x_scales, w_scales, full, empty, _accumulators = operands
    CHUNKS: gl.constexpr = TILE.BLOCK_N // CHUNK
    BYTES: gl.constexpr = (ROWS + TILE.BLOCK_N) * CHUNK + 512 * (1 + CHUNKS)
    num_steps, num_chunks = gl.cdiv(K, CHUNK), gl.cdiv(N, CHUNK)
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, 0)
        for step in range(0, num_steps):
            stage = begin_loads(i, full, empty, BYTES, TILE.num_stages)
            i += 1
            arrived = full.index(stage)
            tma_load(x_desc, [wrap, end, row, step * CHUNK], arrived, x.index(stage))
            tma_load(w_desc, [expert, n_tile * TILE.BLOCK_N, step * CHUNK], arrived, w.index(stage))
            tma_load(x_scales_desc, [(m_tile * num_steps + step) * LINES, 0], arrived, x_scales.index(stage))
            # Past the last column, scales of the next step or expert: columns that are not stored.
            chunk = (expert * num_steps + step) * num_chunks + n_tile * CHUNKS
            tma_load(w_scales_desc, [chunk * LINES, 0], arrived, w_scales.index(stage))


@gluon.jit
def _multiply(K, num_m, num_n, operands, scales, TILE: gl.constexpr):
    """Partition of the warp that multiplies; `K > 0`."""
    i = 0
    for j in range(0, gl.cdiv(num_m * num_n - gl.program_id(0), gl.num_programs(0))):
        i = multiply_tile(j, i, gl.cdiv(K, CHUNK), operands, scales, False, TILE.num_stages)


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
            (_multiply, (K, num_m, num_n, staged, scales, TILE)),
            (_load, (loads, N, K, num_m, num_n, staged, TILE)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
    store_rest((y_ptr, tiles_ptr, N, stride_y_r), partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows)
