"""Partitions that M-ragged passes share, some of them with wgrad.

The producer (one warp, or four where rows are gathered) loads. On Hopper, two consumers multiply in registers and write
(`hopper.py`). On Blackwell, one warp multiplies, and one consumer reads accumulators in tensor memory and writes
(`blackwell.py`).

`pipeline` is `(num_m, num_n, x, w, full, empty, accumulators)`: numbers of row tiles and of column tiles, then the
result of `operands`.
"""

import triton
from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at
from ..device.tiles import column_subtiles
from . import blackwell, hopper
from .gluon_compat import fence_async_shared, gl, gluon, tma_gather, tma_load
from .ring import begin_loads, load_row_ids, mbarriers, shared_tiles, wait_for_operands


@triton.constexpr_function
def worker_warps(consumers, gathered=False, others=0):
    """Number of warps of each partition after the first consumer: second consumer or multiplying warp, producer,
    `others`. Where rows are gathered, each of the producer's four warps loads a quarter of a tile's.
    """
    return [4 if consumers == 2 else 1, 4 if gathered else 1, *[1] * others]


@triton.constexpr_function
def worker_registers(consumers, gathered=False, others=0):
    """Registers per thread of the same partitions; the default one takes the rest of the 65,536.

    Partitions of one warp need few; up to four of them count as one warpgroup. Where rows are gathered, each thread has
    the ids of all rows that its warp loads.
    """
    return [232 if consumers == 2 else 40, 88 if gathered else 40, *[40] * others]


@gluon.jit
def barriers_and_accumulators(CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """`(full, empty, accumulators)`: mbarriers of stages; for one consumer, accumulators of COLUMNS in tensor memory.

    For two consumers `full` stands in for them: a partition takes None only if it is an argument of the kernel.
    """
    # Each of two consumers arrives at `empty`; a single one does not, as its MMAs do.
    full, empty = mbarriers(STAGES, 1), mbarriers(STAGES, CONSUMERS)
    accumulators = full
    if CONSUMERS == 1:
        accumulators = blackwell.tile_accumulators(COLUMNS)
    fence_async_shared()
    return full, empty, accumulators


@gluon.jit
def operands(
    DTYPE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    COLUMNS: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`(x, w, full, empty, accumulators)`: stages in shared memory of a tile's rows of `x`, apart for each consumer,
    and of COLUMNS of `w`; then `barriers_and_accumulators`.
    """
    STAGES: gl.constexpr = TILE.num_stages
    DEPTH: gl.constexpr = TILE.BLOCK_K
    x = shared_tiles(DTYPE, STAGES * CONSUMERS, TILE.BLOCK_M // CONSUMERS, DEPTH)
    w = shared_tiles(DTYPE, STAGES, COLUMNS if K_CONTIGUOUS else DEPTH, DEPTH if K_CONTIGUOUS else COLUMNS)
    full, empty, accumulators = barriers_and_accumulators(CONSUMERS, COLUMNS, STAGES)
    return x, w, full, empty, accumulators


@gluon.jit
def load_operands(
    arguments,
    K,
    pipeline,
    REVERSED: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    HALVES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of the producer in an M-ragged pass: for each step, load rows of `x` and columns of each half of `w`.

    With row ids, which only Blackwell's TMA can gather by, row r is row `row_ids[r]` of `x`.
    """
    x_desc, row_ids_ptr, w_desc, tiles_ptr, num_experts = arguments
    num_m, num_n, x, w, full, empty, _accumulators = pipeline
    CONSUMERS: gl.constexpr = x.shape[0] // TILE.num_stages
    gl.static_assert(row_ids_ptr is None or CONSUMERS == 1)
    ROWS: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = w.shape[1 if K_CONTIGUOUS else 2] // HALVES
    BYTES: gl.constexpr = (CONSUMERS * ROWS + HALVES * COLUMNS) * TILE.BLOCK_K * x.dtype.primitive_bitwidth // 8
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        w_e = num_experts - 1 - expert if REVERSED else expert
        wrap, end, row = to_ragged_indices(first, rows, 0)
        n = n_tile * COLUMNS
        if row_ids_ptr is not None:
            x_row_ids = load_row_ids(row_ids_ptr + first, rows, ROWS)
        for k in range(0, K, TILE.BLOCK_K):
            stage = begin_loads(i, full, empty, BYTES, TILE.num_stages)
            i += 1
            arrived = full.index(stage)
            if row_ids_ptr is not None:
                tma_gather(x_desc, x_row_ids, k, arrived, x.index(stage))
            else:
                for c in gl.static_range(CONSUMERS):
                    tma_load(x_desc, [wrap, end, row + c * ROWS, k], arrived, x.index(stage * CONSUMERS + c))
            if HALVES == 2:
                tma_load(w_desc, [w_e, 0, n, k], arrived, w.index(stage))
            elif K_CONTIGUOUS:
                tma_load(w_desc, [w_e, n, k], arrived, w.index(stage))
            else:
                tma_load(w_desc, [w_e, k, n], arrived, w.index(stage))


@gluon.jit
def product(i, K, pipeline, CONSUMER: gl.constexpr, K_CONTIGUOUS: gl.constexpr, TILE: gl.constexpr):
    """`(x @ w, next i)` for a consumer's rows of a tile, to be passed to `finished`; `K > 0`.

    Two consumers multiply here, and i counts steps; the last step's MMAs still run, and hide what the caller computes
    before it calls `finished`. For a single one i counts tiles, and names the tile in place of the product.
    """
    _, _, x, w, full, empty, _ = pipeline
    STAGES: gl.constexpr = TILE.num_stages
    CONSUMERS: gl.constexpr = x.shape[0] // STAGES
    if CONSUMERS == 1:
        acc, i = i, i + 1
    else:
        gl.assume(K > 0)
        acc = hopper.accumulator(w.shape[1 if K_CONTIGUOUS else 2])
        for k in range(0, K, TILE.BLOCK_K):
            stage = wait_for_operands(i, full, STAGES)
            w_KN = w.index(stage)
            if K_CONTIGUOUS:
                w_KN = w_KN.permute((1, 0))
            acc = hopper.multiply(x.index(stage * CONSUMERS + CONSUMER), w_KN, acc, i, k == 0, empty, STAGES)
            i += 1
    return acc, i


@gluon.jit
def finished(acc, i, pipeline, NUM_SUBTILES: gl.constexpr, TILE: gl.constexpr):
    """Wait for the MMAs of a tile, and return it, to be read by `subtile` in NUM_SUBTILES; `acc, i` of `product`."""
    _, _, x, _, _, empty, accumulators = pipeline
    if x.shape[0] == TILE.num_stages:
        subtiles = blackwell.wait_for_accumulator(acc, accumulators)
    else:
        subtiles = column_subtiles(hopper.finish(acc, i, empty, TILE.num_stages), NUM_SUBTILES)
    return subtiles


@gluon.jit
def subtile(subtiles, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Subtile S (neighbouring columns) of a finished tile, of `finished` or of wgrad. Read each once, and the last one
    last, which frees an accumulator in tensor memory.
    """
    return blackwell.read_subtile(subtiles, S, NUM_SUBTILES) if CONSUMERS == 1 else subtiles[S]
