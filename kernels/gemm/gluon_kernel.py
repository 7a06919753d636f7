"""Passes (2) and (4), warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`.

One warp loads (TMA, `warp_specialized/ring.py`), others multiply (`warp_specialized/partitions.py`). While a finished
tile is stored, the next one's operands arrive, and MMAs go on: those of the other warpgroup on Hopper, into the other
accumulator on Blackwell. No barrier covers the whole block.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at, zero_padding_at
from ..device.tiles import expert_base, load_bias
from ..warp_specialized.blackwell import multiply_tiles
from ..warp_specialized.gluon_compat import gl, gluon, tma_store, tma_store_wait
from ..warp_specialized.partitions import (
    finished,
    load_operands,
    operands,
    product,
    subtile,
    worker_registers,
    worker_warps,
)
from ..warp_specialized.ring import column_numbers, load_for_rows, overwrite, shared_tiles, whole_rows
from .dprobs import sum_partials
from .epilogue import add_bias

# Upper bound on a consumer's buffers for subtiles that are being stored; the number of subtiles is a power of two.
BUFFERS = gl.constexpr(2)


@gluon.jit
def store_subtile(
    y_MN,
    arguments,
    tile,
    place,
    n_tile,
    out,
    S: gl.constexpr,
    CONSUMER: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Finish subtile S of a consumer's ROWS rows of a tile, and store it through one of the consumer's buffers.

    `tile`: from `load_tile`; `place`: the ragged indices of the consumer's first row.
    """
    bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr, y_desc, _, N, _ = arguments
    expert, first, rows = tile
    TURNS: gl.constexpr = min(BUFFERS, TILE.SUBTILES)
    column = n_tile * TILE.BLOCK_N + S * (TILE.BLOCK_N // TILE.SUBTILES)
    bias_1N, scale_M1 = None, None
    if bias_ptr is not None:
        bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
        bias_1N = load_bias(bias, column_numbers(y_MN, column), N)
        if scale_ptr is not None:
            scale_M1 = load_for_rows(scale_ptr + first, y_MN, CONSUMER * ROWS, rows)
    y_MN = add_bias(y_MN, bias_1N, scale_M1, out.dtype)
    wrap, end, row = place
    buffer = out.index(CONSUMER * TURNS + S % TURNS)
    overwrite(buffer, y_MN, TURNS - 1)
    tma_store(y_desc, [wrap, end, row, column], buffer)


@gluon.jit
def store_rest(y, partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows):
    """Store zeros in padding rows of `y`, given by pointer, tiles, columns and stride, and sum `dprobs` if there are
    any.
    """
    y_ptr, tiles_ptr, N, stride_y_r = y
    row_M1, column_1N = whole_rows(128)
    zero_padding_at(y_ptr, tiles_ptr, N, stride_y_r, 1, row_M1, column_1N)
    if partial_ptr is not None:
        indices = gl.arange(0, 256, gl.BlockedLayout([8 // gl.num_warps()], [32], [gl.num_warps()], [0]))
        sum_partials(partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows, indices)


@gluon.jit
def _consume(
    arguments,
    pipeline,
    out,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of a consumer; `out`: its buffers for stores."""
    tiles_ptr, K = arguments[5], arguments[7]
    SUBTILES: gl.constexpr = TILE.SUBTILES
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    num_m, num_n = pipeline[0], pipeline[1]
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        acc, i = product(i, K, pipeline, CONSUMER, K_CONTIGUOUS, TILE)
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        place = to_ragged_indices(tile[1], tile[2], CONSUMER * ROWS)
        subtiles = finished(acc, i, pipeline, SUBTILES, TILE)
        for s in gl.static_range(SUBTILES):
            y_MN = subtile(subtiles, s, SUBTILES, CONSUMERS)
            store_subtile(y_MN, arguments, tile, place, n_tile, out, s, CONSUMER, ROWS, TILE)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_partials", "num_rows"])
def grouped_gemm_warp_specialized_kernel(
    x_desc,
    w_desc,
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
    stride_bias_e,
    stride_y_r,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Passes (2) and (4); arguments as in the Triton kernel."""
    gl.static_assert(TILE.BLOCK_M == 128)
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    x, w, full, empty, accumulators = operands(x_desc.dtype, CONSUMERS, TILE.BLOCK_N, K_CONTIGUOUS, TILE)
    pipeline = (gl.load(tiles_ptr), gl.cdiv(N, TILE.BLOCK_N), x, w, full, empty, accumulators)
    out = shared_tiles(y_desc.dtype, CONSUMERS * min(BUFFERS, TILE.SUBTILES), ROWS, TILE.BLOCK_N // TILE.SUBTILES)
    arguments = (bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr, y_desc, tiles_ptr, N, K)
    loads = (x_desc, None, w_desc, tiles_ptr, num_experts)
    gl.warp_specialize(
        [
            (_consume, (arguments, pipeline, out, gl.constexpr(0), CONSUMERS, K_CONTIGUOUS, TILE)),
            (_consume, (arguments, pipeline, out, gl.constexpr(1), CONSUMERS, K_CONTIGUOUS, TILE))
            if CONSUMERS == 2
            else (multiply_tiles, (K, pipeline, K_CONTIGUOUS, TILE)),
            (load_operands, (loads, K, pipeline, REVERSED, K_CONTIGUOUS, 1, TILE)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
    store_rest((y_ptr, tiles_ptr, N, stride_y_r), partial_ptr, dprobs_rows_ptr, dprobs_ptr, num_partials, num_rows)
