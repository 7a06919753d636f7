"""wgrad of token copies in 8 bits (recipe fp8_block) on Hopper, warp-specialized: the tiles of `gluon_kernel.py`, in
the same order, added to `dw` in the same way.

A step is a tile of 128 tokens of one expert. Both operands are transposed, `[tiles, C, 128]`, so that the tokens are
contiguous, as `wgmma` needs them in 8 bits; after the last token of an expert they are zeros. Each column of an
operand has a scale in every tile, so sums of a step are multiplied by the product of two vectors.
"""

from ..device.tile_order import num_turns, tile_index_at, wgrad_tile
from ..device.tiles import column_subtiles
from ..warp_specialized.fp8_block import BLOCK, CONSUMERS, multiply_step, promote, scale_stages, zeros
from ..warp_specialized.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma_load, tma_store_wait
from ..warp_specialized.hopper import ROWS
from ..warp_specialized.partitions import worker_registers, worker_warps
from ..warp_specialized.ring import begin_loads, mbarriers, shared_tiles, wait_for_operands
from .gluon_kernel import BUFFERS, add_subtile


@gluon.jit
def _load(left_desc, left_scales_desc, right_desc, right_scales_desc, tables, pipeline, TILE: gl.constexpr):
    """Partition of the producer."""
    steps_ptr, order_ptr, num_experts = tables
    turns, num_n, num_k, num_right_chunks, left, right, scales, full, empty = pipeline
    BYTES: gl.constexpr = (TILE.BLOCK_N + TILE.BLOCK_K) * BLOCK + 3 * 4 * BLOCK
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
            for c in gl.static_range(CONSUMERS):
                at = [t, n_tile * TILE.BLOCK_N + c * ROWS, 0]
                tma_load(left_desc, at, arrived, left.index(stage * CONSUMERS + c))
            tma_load(right_desc, [t, k_tile * TILE.BLOCK_K, 0], arrived, right.index(stage))
            tma_load(left_scales_desc, [(t * num_n + n_tile) * BLOCK], arrived, scales.index(3 * stage))
            for c in gl.static_range(2):
                chunk = t * num_right_chunks + 2 * k_tile + c
                tma_load(right_scales_desc, [chunk * BLOCK], arrived, scales.index(3 * stage + 1 + c))
            t = gl.load(tile_ptr + gl.minimum(step + 1, steps - 1))


@gluon.jit
def _consume(
    arguments,
    CONSUMER: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,
    DW_ALIGNED: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of a consumer; `out`: its buffers for stores, if `dw` has a descriptor."""
    dw, tables, pipeline, out = arguments
    steps_ptr, order_ptr, num_experts = tables
    turns, num_n, num_k, _, left, right, scales, full, empty = pipeline
    SUBTILES: gl.constexpr = TILE.SUBTILES
    EACH: gl.constexpr = SUBTILES // 2  # subtiles of a part
    WIDTH: gl.constexpr = TILE.BLOCK_K // SUBTILES
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    for turn in range(0, turns):
        rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        expert = gl.load(order_ptr + rank)
        steps = gl.load(steps_ptr + expert + 1) - gl.load(steps_ptr + expert)
        parts = (zeros(), zeros())
        layout: gl.constexpr = parts[0].type.layout
        for _ in range(0, steps):
            stage = wait_for_operands(i, full, TILE.num_stages)
            left_NR, right_KR, first = left.index(stage * CONSUMERS + CONSUMER), right.index(stage), 3 * stage
            scale_N = scales.index(first).slice(CONSUMER * ROWS, ROWS).load(gl.SliceLayout(1, layout))
            sums = multiply_step(left_NR, right_KR.slice(0, BLOCK))
            scale_K = scales.index(first + 1).load(gl.SliceLayout(0, layout))
            low = promote(parts[0], sums, scale_N, scale_K)
            wait_for_operands(i, full, TILE.num_stages)  # as in `fp8_block.product`
            sums = multiply_step(left_NR, right_KR.slice(BLOCK, BLOCK))
            scale_K = scales.index(first + 2).load(gl.SliceLayout(0, layout))
            parts = (low, promote(parts[1], sums, scale_N, scale_K))
            mbarrier.arrive(empty.index(stage), count=1)
            i += 1
        n, k = n_tile * TILE.BLOCK_N + CONSUMER * ROWS, k_tile * TILE.BLOCK_K
        for s in gl.static_range(SUBTILES):
            tile_NK = column_subtiles(parts[s // EACH], EACH)[s % EACH]
            buffer = CONSUMER * BUFFERS + s % BUFFERS
            add_subtile(
                tile_NK, dw, out, buffer, expert, num_experts, n, k + s * WIDTH, ACCUMULATE, REVERSED, DW_ALIGNED
            )
    tma_store_wait(0)


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
    gl.static_assert((TILE.BLOCK_M == BLOCK) and (TILE.BLOCK_K == 2 * BLOCK))
    gl.static_assert(TILE.BLOCK_N == CONSUMERS * ROWS)
    gl.static_assert(TILE.SUBTILES % BUFFERS == 0)  # so every tile begins with buffer 0
    STAGES: gl.constexpr = TILE.num_stages
    num_n, num_k = gl.cdiv(N, TILE.BLOCK_N), gl.cdiv(K, TILE.BLOCK_K)
    num_used = gl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
    turns = num_turns(num_used * num_n * num_k, gl.program_id(0), gl.num_programs(0))
    left = shared_tiles(left_desc.dtype, STAGES * CONSUMERS, ROWS, BLOCK)
    right = shared_tiles(right_desc.dtype, STAGES, TILE.BLOCK_K, BLOCK)
    scales = scale_stages(STAGES * 3)  # of the left operand, then of the right one's two chunks
    full, empty = mbarriers(STAGES, 1), mbarriers(STAGES, CONSUMERS)
    fence_async_shared()
    out = full  # unused without a descriptor: a partition takes None only if it is an argument of the kernel
    if dw_desc is not None:
        out = shared_tiles(dw_desc.dtype, CONSUMERS * BUFFERS, ROWS, TILE.BLOCK_K // TILE.SUBTILES)
    tables = (steps_ptr, order_ptr, num_experts)
    num_right_chunks = gl.cdiv(K, BLOCK)
    pipeline = (turns, num_n, num_k, num_right_chunks, left, right, scales, full, empty)
    dw = (dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k)
    arguments = (dw, tables, pipeline, out)
    gl.warp_specialize(
        [
            (_consume, (arguments, gl.constexpr(0), ACCUMULATE, REVERSED, DW_ALIGNED, TILE)),
            (_consume, (arguments, gl.constexpr(1), ACCUMULATE, REVERSED, DW_ALIGNED, TILE)),
            (_load, (left_desc, left_scales_desc, right_desc, right_scales_desc, tables, pipeline, TILE)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
