"""Partitions that M-ragged passes share, some of them with wgrad: one warp loads, or four where rows are gathered; two
consumers multiply in registers and write (Hopper, `hopper.py`), or one warp multiplies and one consumer finds sums
in tensor memory and writes (`blackwell.py`).

`loop` is `(num_m, num_n, x, w, full, empty, sums)`: tiles of rows and of columns, then what `operands` returns.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at
from ..device.tiles import column_subtiles
from . import blackwell, hopper
from .gluon_compat import fence_async_shared, gl, gluon, tma_gather, tma_load
from .ring import begin_loads, mbarriers, rows_of_index, shared_tiles, wait_for_operands

# Registers per thread. The default partition takes the rest of the 65,536. Partitions of one warp, up to four of which
# count as a warpgroup, need few.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
# Where rows are gathered, each thread of a warp has the numbers of all rows that the warp loads: four warps, a quarter
# of a tile's rows each.
GATHERING_WARPS = gl.constexpr(4)
GATHERING_REGISTERS = gl.constexpr(88)


@gluon.jit
def stages_and_sums(CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """`(full, empty, sums)`: mbarriers of stages; sums of tiles so wide in tensor memory, or, with two consumers,
    something in their place (only a kernel's own argument can be None where a task takes it).
    """
    # At `empty` each consumer arrives; a single one does not, but the products themselves do.
    full, empty = mbarriers(STAGES, 1), mbarriers(STAGES, CONSUMERS)
    sums = full
    if CONSUMERS == 1:
        sums = blackwell.tile_sums(COLUMNS)
    fence_async_shared()
    return full, empty, sums


@gluon.jit
def operands(
    DTYPE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    COLUMNS: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`(x, w, full, empty, sums)`: stages in shared memory of a tile's rows of `x`, each consumer's apart, and of
    COLUMNS of `w`, and what belongs to them.
    """
    STAGES: gl.constexpr = TILE.num_stages
    DEPTH: gl.constexpr = TILE.BLOCK_K
    x = shared_tiles(DTYPE, STAGES * CONSUMERS, TILE.BLOCK_M // CONSUMERS, DEPTH)
    w = shared_tiles(DTYPE, STAGES, COLUMNS if K_CONTIGUOUS else DEPTH, DEPTH if K_CONTIGUOUS else COLUMNS)
    full, empty, sums = stages_and_sums(CONSUMERS, COLUMNS, STAGES)
    return x, w, full, empty, sums


@gluon.jit
def load_operands(
    x_desc,
    rows_ptr,
    w_desc,
    tiles_ptr,
    num_experts,
    K,
    loop,
    REVERSED: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    HALVES: gl.constexpr,
    TILE: gl.constexpr,
):
    """The producer's task in an M-ragged pass: of each step rows of `x`, and columns of `w` (in fc1 of each half).

    With `rows`, which Blackwell's TMA follows, row r is row `rows[r]` of `x`.
    """
    num_m, num_n, x, w, full, empty, _sums = loop
    CONSUMERS: gl.constexpr = x.shape[0] // TILE.num_stages
    gl.static_assert(rows_ptr is None or CONSUMERS == 1)
    ROWS: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = w.shape[1 if K_CONTIGUOUS else 2] // HALVES
    BYTES: gl.constexpr = (CONSUMERS * ROWS + HALVES * COLUMNS) * TILE.BLOCK_K * x.dtype.primitive_bitwidth // 8
    i = 0
    for place in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(place, num_m, num_n, TILE.GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        w_e = num_experts - 1 - expert if REVERSED else expert
        wrap, end, row = to_ragged_indices(first, rows, 0)
        n = n_tile * COLUMNS
        if rows_ptr is not None:
            x_rows = rows_of_index(rows_ptr + first, rows, ROWS)
        for k in range(0, K, TILE.BLOCK_K):
            stage = begin_loads(i, full, empty, BYTES, TILE.num_stages)
            i += 1
            arrived = full.index(stage)
            if rows_ptr is not None:
                tma_gather(x_desc, x_rows, k, arrived, x.index(stage))
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
def product(
    i,
    K,
    loop,
    WHICH: gl.constexpr,
    PARTS: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`(x @ w, next i)`: a consumer's rows of a tile, of whose columns `part` gives each of PARTS; `K > 0`.

    Two consumers multiply here, and i counts steps; a single one waits for sums, and i counts tiles.
    """
    _, _, x, w, full, empty, sums = loop
    STAGES: gl.constexpr = TILE.num_stages
    CONSUMERS: gl.constexpr = x.shape[0] // STAGES
    if CONSUMERS == 1:
        parts = blackwell.wait_for_sums(i, sums)
        i += 1
    else:
        acc = hopper.sums(w.shape[1 if K_CONTIGUOUS else 2])
        for k in range(0, K, TILE.BLOCK_K):
            stage = wait_for_operands(i, full, STAGES)
            w_KN = w.index(stage)
            if K_CONTIGUOUS:
                w_KN = w_KN.permute((1, 0))
            acc = hopper.multiply(x.index(stage * CONSUMERS + WHICH), w_KN, acc, i, k == 0, empty, STAGES)
            i += 1
        parts = column_subtiles(hopper.finish(acc, i, empty, STAGES), PARTS)
    return parts, i


@gluon.jit
def part(parts, S: gl.constexpr, PARTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Neighbouring columns, those of S, of sums from `product`, or as wgrad has them. Each part is to be asked for once
    and the last one last, with which sums in tensor memory are given back.
    """
    return blackwell.read_part(parts, S, PARTS) if CONSUMERS == 1 else parts[S]
