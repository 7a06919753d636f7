"""wgrad of token copies in 8 bits (recipe mxfp8) on Blackwell, warp-specialized: the tiles of `gluon_kernel.py`, in the
same order, added to `dw` in the same way.

A step is a tile of 128 tokens of one expert, `[tiles, 128, C]`; after the last token of an expert they are zeros. Each
column of an operand has a scale for 32 tokens.
"""

from ..device.tile_order import num_turns, tile_index_at, wgrad_tile
from ..warp_specialized.blackwell import ROWS, read_subtiles, wait_for_accumulator
from ..warp_specialized.gluon_compat import gl, gluon, tma_load, tma_store_wait
from ..warp_specialized.mxfp8 import CHUNK, LINES, multiply_tile, operands, scales_in_tensor_memory
from ..warp_specialized.partitions import worker_registers, worker_warps
from ..warp_specialized.ring import begin_loads, shared_tiles, spread_by_rows
from .gluon_kernel import BUFFERS, add_subtile


@gluon.jit
def _load(left_desc, left_scales_desc, right_desc, right_scales_desc, K, tables, turns, operands, TILE: gl.constexpr):
    """Partition of the producer."""
    steps_ptr, order_ptr, num_experts, num_n, num_k = tables
    left, right, left_scales, right_scales, full, empty, _accumulators = operands
    CHUNKS: gl.constexpr = TILE.BLOCK_K // CHUNK
    BYTES: gl.constexpr = (TILE.BLOCK_N + TILE.BLOCK_K) * CHUNK + 512 * (1 + CHUNKS)
    num_right_chunks = gl.cdiv(K, CHUNK)
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    for turn in range(0, turns):
        rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        expert = gl.load(order_ptr + rank)
        first = gl.load(steps_ptr + expert)
        steps = gl.load(steps_ptr + expert + 1) - first
        tile_ptr = steps_ptr + num_experts + 1 + first
        t = gl.load(tile_ptr)  # read one step ahead
        for step in range(0, steps):
            stage = begin_loads(i, full, empty, BYTES, TILE.num_stages)
            i += 1
            arrived = full.index(stage)
            tma_load(left_desc, [t, 0, n_tile * TILE.BLOCK_N], arrived, left.index(stage))
            tma_load(right_desc, [t, 0, k_tile * TILE.BLOCK_K], arrived, right.index(stage))
            tma_load(left_scales_desc, [(t * num_n + n_tile) * LINES, 0], arrived, left_scales.index(stage))
            chunk = t * num_right_chunks + k_tile * CHUNKS  # past the last column, scales of the next tile
            tma_load(right_scales_desc, [chunk * LINES, 0], arrived, right_scales.index(stage))
            t = gl.load(tile_ptr + gl.minimum(step + 1, steps - 1))


@gluon.jit
def _multiply(tables, turns, operands, scales, TILE: gl.constexpr):
    """Partition of the warp that multiplies. It looks up a tile while MMAs still run."""
    steps_ptr, order_ptr, _, num_n, num_k = tables
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    for turn in range(0, turns):
        rank, _, _ = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        expert = gl.load(order_ptr + rank)
        steps = gl.load(steps_ptr + expert + 1) - gl.load(steps_ptr + expert)
        i = multiply_tile(turn, i, steps, operands, scales, True, TILE.num_stages)


@gluon.jit
def _consume(
    dw,
    tables,
    turns,
    accumulators,
    out,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,
    DW_ALIGNED: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of the consumer; `out`: its buffers for stores, if `dw` has a descriptor."""
    steps_ptr, order_ptr, num_experts, num_n, num_k = tables
    dw_desc = dw[2]
    SUBTILES: gl.constexpr = TILE.SUBTILES
    WIDTH: gl.constexpr = TILE.BLOCK_K // SUBTILES
    program, programs = gl.program_id(0), gl.num_programs(0)
    for turn in range(0, turns):
        rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        expert = gl.load(order_ptr + rank)
        n, k = n_tile * TILE.BLOCK_N, k_tile * TILE.BLOCK_K
        subtiles = read_subtiles(wait_for_accumulator(turn, accumulators), 0, SUBTILES)
        for s in gl.static_range(SUBTILES):
            tile_NK = subtiles[s]
            if not ACCUMULATE:  # without steps, the accumulator has another tile's sums
                steps = gl.load(steps_ptr + expert + 1) - gl.load(steps_ptr + expert)
                tile_NK = gl.where(steps > 0, tile_NK, 0.0)
            if dw_desc is None:
                tile_NK = spread_by_rows(tile_NK)
            add_subtile(
                tile_NK, dw, out, s % BUFFERS, expert, num_experts, n, k + s * WIDTH, ACCUMULATE, REVERSED, DW_ALIGNED
            )
    tma_store_wait(0)


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
    gl.static_assert(TILE.SUBTILES % BUFFERS == 0)  # so every tile begins with buffer 0
    num_n, num_k = gl.cdiv(N, TILE.BLOCK_N), gl.cdiv(K, TILE.BLOCK_K)
    num_used = gl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
    turns = num_turns(num_used * num_n * num_k, gl.program_id(0), gl.num_programs(0))
    staged = operands(left_desc.dtype, TILE.BLOCK_K, True, TILE.num_stages)
    scales = scales_in_tensor_memory(TILE.BLOCK_K)
    out = staged[4]  # unused without a descriptor: a partition takes None only if it is an argument of the kernel
    if dw_desc is not None:
        out = shared_tiles(dw_desc.dtype, BUFFERS, ROWS, TILE.BLOCK_K // TILE.SUBTILES)
    tables = (steps_ptr, order_ptr, num_experts, num_n, num_k)
    dw = (dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k)
    gl.warp_specialize(
        [
            (_consume, (dw, tables, turns, staged[6], out, ACCUMULATE, REVERSED, DW_ALIGNED, TILE)),
            (_multiply, (tables, turns, staged, scales, TILE)),
            (_load, (left_desc, left_scales_desc, right_desc, right_scales_desc, K, tables, turns, staged, TILE)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
