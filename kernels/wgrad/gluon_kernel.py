"""wgrad, warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`.

One warp loads (TMA, `warp_specialized/ring.py`; four where rows are gathered), others multiply. While a finished tile
is added to `dw`, the next one's operands arrive, and MMAs go on: those of the other warpgroup on Hopper, into the other
accumulator on Blackwell. No barrier covers the whole block. TMA adds to an fp32 `dw`, or stores; threads write a `dw`
that no descriptor fits, or that has 16 bits and is added to.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import num_turns, tile_index_at, wgrad_tile
from ..device.tiles import column_subtiles, expert_base
from ..warp_specialized.blackwell import multiply_tile, wait_for_accumulator
from ..warp_specialized.gluon_compat import gl, gluon, tma_add, tma_gather, tma_load, tma_store, tma_store_wait
from ..warp_specialized.hopper import accumulator, finish, multiply
from ..warp_specialized.partitions import barriers_and_accumulators, subtile, worker_registers, worker_warps
from ..warp_specialized.ring import (
    begin_loads,
    column_numbers,
    load_row_ids,
    overwrite,
    row_numbers,
    shared_tiles,
    spread_by_rows,
    wait_for_operands,
)
from .epilogue import add_at
from .segments import load_step

BUFFERS = gl.constexpr(2)  # for each consumer, for subtiles that are being stored, in turn


@gluon.jit
def _steps_of(expert, offsets_ptr, steps_ptr, BLOCK_R: gl.constexpr):
    """`(first row, rows, steps)` of an expert; with several segments `(first step, steps, steps)`.

    An expert without rows has one empty step, which writes zeros; with several segments `wgrad/steps.py` lists it.
    """
    first_ptr = offsets_ptr if steps_ptr is None else steps_ptr
    first = gl.load(first_ptr + expert)
    size = gl.load(first_ptr + expert + 1) - first
    return first, size, gl.maximum(gl.cdiv(size, BLOCK_R), 1) if steps_ptr is None else size


@gluon.jit
def _load(left_desc, left_row_ids_ptr, right_desc, right_row_ids_ptr, tables, pipeline, TILE: gl.constexpr):
    """Partition of the producer; `tables`: those of rows and segments, and the order of experts."""
    offsets_ptr, segments_ptr, steps_ptr, order_ptr, num_segments, num_experts = tables
    turns, num_n, num_k, left, right, full, empty, _accumulators = pipeline
    CONSUMERS: gl.constexpr = left.shape[0] // TILE.num_stages
    ROWS: gl.constexpr = TILE.BLOCK_N // CONSUMERS
    BYTES: gl.constexpr = TILE.BLOCK_M * (TILE.BLOCK_N + TILE.BLOCK_K) * left.dtype.primitive_bitwidth // 8
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    for turn in range(0, turns):
        rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        first, size, steps = _steps_of(gl.load(order_ptr + rank), offsets_ptr, steps_ptr, TILE.BLOCK_M)
        n, k = n_tile * TILE.BLOCK_N, k_tile * TILE.BLOCK_K
        # Row ids and segments are read one step ahead.
        if left_row_ids_ptr is not None:
            left_row_ids = load_row_ids(left_row_ids_ptr + first, size, TILE.BLOCK_M)
        if right_row_ids_ptr is not None:
            right_row_ids = load_row_ids(right_row_ids_ptr + first, size, TILE.BLOCK_M)
        if steps_ptr is not None:
            row, rows, left_base, right_base = load_step(steps_ptr, segments_ptr, first, num_segments, num_experts)
        for step in range(0, steps):
            stage = begin_loads(i, full, empty, BYTES, TILE.num_stages)
            i += 1
            arrived = full.index(stage)
            if steps_ptr is None:
                wrap, end, row = to_ragged_indices(first, size, step * TILE.BLOCK_M)
                done = (step + 1) * TILE.BLOCK_M
                if left_row_ids_ptr is not None:
                    tma_gather(left_desc, left_row_ids, n, arrived, left.index(stage))
                    left_row_ids = load_row_ids(left_row_ids_ptr + first + done, size - done, TILE.BLOCK_M)
                else:
                    for c in gl.static_range(CONSUMERS):
                        at = [wrap, end, row, n + c * ROWS]
                        tma_load(left_desc, at, arrived, left.index(stage * CONSUMERS + c))
                if right_row_ids_ptr is not None:
                    tma_gather(right_desc, right_row_ids, k, arrived, right.index(stage))
                    right_row_ids = load_row_ids(right_row_ids_ptr + first + done, size - done, TILE.BLOCK_M)
                else:
                    tma_load(right_desc, [wrap, end, row, k], arrived, right.index(stage))
            else:
                wrap, end, from_wrap = to_ragged_indices(row, rows, 0)
                for c in gl.static_range(CONSUMERS):
                    at = [wrap, end, left_base.to(gl.int32), from_wrap, n + c * ROWS]
                    tma_load(left_desc, at, arrived, left.index(stage * CONSUMERS + c))
                tma_load(right_desc, [wrap, end, right_base.to(gl.int32), from_wrap, k], arrived, right.index(stage))
                following = first + gl.minimum(step + 1, steps - 1)
                row, rows, left_base, right_base = load_step(
                    steps_ptr, segments_ptr, following, num_segments, num_experts
                )


@gluon.jit
def _multiply(tables, pipeline, TILE: gl.constexpr):
    """Partition of the warp that multiplies for a single consumer. It looks up a tile while MMAs still run."""
    offsets_ptr, _, steps_ptr, order_ptr, _, _ = tables
    turns, num_n, num_k, left, right, full, empty, accumulators = pipeline
    operands = (left, right, full, empty, accumulators)
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    for turn in range(0, turns):
        rank, _, _ = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        _, _, steps = _steps_of(gl.load(order_ptr + rank), offsets_ptr, steps_ptr, TILE.BLOCK_M)
        i = multiply_tile(turn, i, steps, operands, True, False, TILE.num_stages)


@gluon.jit
def add_subtile(
    tile_NK,
    dw,
    out,
    buffer_number,
    expert,
    num_experts,
    n,
    k,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,
    DW_ALIGNED: gl.constexpr,
):
    """`dw[expert, n:, k:] (+)= tile`, through one of the buffers `out` if `dw` has a descriptor."""
    dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k = dw
    if dw_desc is not None:
        buffer = out.index(buffer_number)
        overwrite(buffer, tile_NK.to(out.dtype), BUFFERS - 1)
        at = [num_experts - 1 - expert if REVERSED else expert, n, k]
        if ACCUMULATE:
            tma_add(dw_desc, at, buffer)
        else:
            tma_store(dw_desc, at, buffer)
    else:
        row_N1, column_1K = row_numbers(tile_NK, n)[:, None], column_numbers(tile_NK, k)
        base = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert, DW_ALIGNED)
        add_at(base, row_N1, column_1K, tile_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE)


@gluon.jit
def _consume(
    arguments,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,
    DW_ALIGNED: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of a consumer; `out`: its buffers for stores, if `dw` has a descriptor."""
    dw, tables, pipeline, out = arguments
    dw_desc = dw[2]
    offsets_ptr, _, steps_ptr, order_ptr, _, num_experts = tables
    turns, num_n, num_k, left, right, full, empty, accumulators = pipeline
    SUBTILES: gl.constexpr = TILE.SUBTILES
    ROWS: gl.constexpr = TILE.BLOCK_N // CONSUMERS
    WIDTH: gl.constexpr = TILE.BLOCK_K // SUBTILES
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = 0
    for turn in range(0, turns):
        rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        expert = gl.load(order_ptr + rank)
        _, _, steps = _steps_of(expert, offsets_ptr, steps_ptr, TILE.BLOCK_M)
        n, k = n_tile * TILE.BLOCK_N + CONSUMER * ROWS, k_tile * TILE.BLOCK_K
        if CONSUMERS == 1:
            subtiles = wait_for_accumulator(turn, accumulators)
        else:
            acc_NK = accumulator(TILE.BLOCK_K)
            for step in range(0, steps):
                stage = wait_for_operands(i, full, TILE.num_stages)
                left_NR = left.index(stage * CONSUMERS + CONSUMER).permute((1, 0))
                acc_NK = multiply(left_NR, right.index(stage), acc_NK, i, step == 0, empty, TILE.num_stages)
                i += 1
            subtiles = column_subtiles(finish(acc_NK, i, empty, TILE.num_stages), SUBTILES)
        for s in gl.static_range(SUBTILES):
            tile_NK = subtile(subtiles, s, SUBTILES, CONSUMERS)
            if CONSUMERS == 1 and dw_desc is None:
                tile_NK = spread_by_rows(tile_NK)
            buffer = CONSUMER * BUFFERS + s % BUFFERS
            add_subtile(
                tile_NK, dw, out, buffer, expert, num_experts, n, k + s * WIDTH, ACCUMULATE, REVERSED, DW_ALIGNED
            )
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_segments", "num_experts"])
def grouped_wgrad_warp_specialized_kernel(
    left_desc,
    left_row_ids_ptr,
    right_desc,
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
    stride_dw_e,
    stride_dw_n,
    stride_dw_k,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,  # dw_desc starts at the last expert
    DW_ALIGNED: gl.constexpr,  # every expert's address is a multiple of 16 bytes
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Passes (5) and (6) without biases; arguments as in the Triton kernel, operands by descriptors."""
    gl.static_assert(TILE.BLOCK_N == 128)
    gl.static_assert(TILE.SUBTILES % BUFFERS == 0)  # so every tile begins with buffer 0
    ROWS: gl.constexpr = TILE.BLOCK_N // CONSUMERS
    num_n, num_k = gl.cdiv(N, TILE.BLOCK_N), gl.cdiv(K, TILE.BLOCK_K)
    num_used = gl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
    turns = num_turns(num_used * num_n * num_k, gl.program_id(0), gl.num_programs(0))
    left = shared_tiles(left_desc.dtype, TILE.num_stages * CONSUMERS, TILE.BLOCK_M, ROWS)
    right = shared_tiles(right_desc.dtype, TILE.num_stages, TILE.BLOCK_M, TILE.BLOCK_K)
    full, empty, accumulators = barriers_and_accumulators(CONSUMERS, TILE.BLOCK_K, TILE.num_stages)
    out = full  # unused without a descriptor: a partition takes None only if it is an argument of the kernel
    if dw_desc is not None:
        out = shared_tiles(dw_desc.dtype, CONSUMERS * BUFFERS, ROWS, TILE.BLOCK_K // TILE.SUBTILES)
    tables = (offsets_ptr, segments_ptr, steps_ptr, order_ptr, num_segments, num_experts)
    pipeline = (turns, num_n, num_k, left, right, full, empty, accumulators)
    dw = (dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k)
    GATHERED: gl.constexpr = (left_row_ids_ptr is not None) or (right_row_ids_ptr is not None)
    gl.static_assert((not GATHERED) or (CONSUMERS == 1 and steps_ptr is None))
    arguments = (dw, tables, pipeline, out)
    gl.warp_specialize(
        [
            (_consume, (arguments, gl.constexpr(0), CONSUMERS, ACCUMULATE, REVERSED, DW_ALIGNED, TILE)),
            (_consume, (arguments, gl.constexpr(1), CONSUMERS, ACCUMULATE, REVERSED, DW_ALIGNED, TILE))
            if CONSUMERS == 2
            else (_multiply, (tables, pipeline, TILE)),
            (_load, (left_desc, left_row_ids_ptr, right_desc, right_row_ids_ptr, tables, pipeline, TILE)),
        ],
        worker_warps(CONSUMERS, GATHERED),
        worker_registers(CONSUMERS, GATHERED),
    )
