"""What kernels with a task for each warp share: a ring of stages of operands, which one warp fills and two warpgroups
multiply.

Of every stage there are two mbarriers. `full`: its operands have arrived (the producer arrives once, and TMA with the
bytes). `empty`: both consumers have multiplied it. Step i of a program, counted over all its tiles, uses stage
`i % STAGES` for the time `i // STAGES`, so each side waits for a parity and nobody counts anything else; a wait for
parity 1 on a new mbarrier passes, so the first STAGES loads wait for nobody. The producer runs up to STAGES steps
ahead, into the next tile's, while consumers still write the last one.

docs/specialised.md derives why nothing waits for ever and nothing is overwritten that is still read. It rests on this:
an arrival is made by one thread, and the compiler has all warps of the task meet before it (`bar.sync`).

In every M-ragged kernel `loop` is `(num_m, num_n, x, w, full, empty)`: tiles of rows and of columns, then what
`operands` returns.
"""

from triton.tools.ragged_tma import to_ragged_indices

from .gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from .schedule import load_tile, tile_at

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer: wgmma's M
# Of a thread. All 65,536 for three warpgroups are 168 each: those of two consumers and of the producer, whose one warp
# (of dgrad two) is counted as a warpgroup.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many, each of which waits for so many arrivals. Before they are used: `fence_async_shared`."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def shared_tiles(DTYPE: gl.constexpr, COUNT: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """`[COUNT, M, N]` of shared memory as TMA and wgmma want it, swizzled as `Descriptor.checked` says to TMA."""
    WIDTH: gl.constexpr = N * DTYPE.primitive_bitwidth // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if WIDTH > 128 else WIDTH, element_bitwidth=DTYPE.primitive_bitwidth, rank=2
    )
    return gl.allocate_shared_memory(DTYPE, [COUNT, M, N], layout)


@gluon.jit
def begin_loads(i, full, empty, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """The producer's: waits until the stage of step i, which is returned, may be overwritten. It arrives at `full` by
    `expect`, and so many bytes are waited for.
    """
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@gluon.jit
def wait_for_operands(i, full, STAGES: gl.constexpr):
    """A consumer's: waits for the operands of step i, whose stage is returned."""
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    return stage


@gluon.jit
def sums(N: gl.constexpr):
    """Of a consumer before its first product: zeros, `[ROWS, N]`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    return warpgroup_mma_init(gl.zeros((ROWS, N), gl.float32, layout))


@gluon.jit
def multiply(a, b, acc, i, is_first, empty, STAGES: gl.constexpr):
    """`acc + a @ b`, or `a @ b` in the first step of a tile. This product is left running; the one before is done, and
    its stage, that of step i - 1, is given back (a tile's last one in `finish`). So there must be two stages.
    """
    gl.static_assert(STAGES > 1)
    acc = warpgroup_mma(a, b, acc, use_acc=not is_first, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=not is_first)
    return warpgroup_mma_init(acc)  # sums on their way, as they went in


@gluon.jit
def finish(acc, i, any_step, empty, STAGES: gl.constexpr):
    """The sums of a tile, whose last step was that before i; its stage is given back."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=any_step)
    return acc


@gluon.jit
def places(tile, row, column):
    """`([M, 1], [1, N])` row and column numbers of a tile's elements, as the tile is spread over threads."""
    layout: gl.constexpr = tile.type.layout
    rows = row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    return rows[:, None], columns[None, :]


@gluon.jit
def row_zeros(tile):
    """A zero for each of a tile's rows, `[M, 1]`, as the tile is spread over threads."""
    layout: gl.constexpr = tile.type.layout
    return gl.zeros((tile.shape[0], 1), gl.float32, layout)


@gluon.jit
def whole_rows(M: gl.constexpr):
    """`places` of a tile of M rows that four warps write row by row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    return rows[:, None], columns[None, :]


@gluon.jit
def overwrite(buffer, tile, RUNNING: gl.constexpr):
    """Waits until at most RUNNING of this consumer's stores still read, then writes a buffer, from which TMA may store:
    one that comes again after RUNNING + 1 stores.
    """
    tma_store_wait(RUNNING)
    barrier()  # of all threads, as those that store have waited
    buffer.store(tile)
    fence_async_shared()
    barrier()


@gluon.jit
def load_operands(
    x_desc,
    w_desc,
    tiles_ptr,
    num_experts,
    K,
    loop,
    REVERSED: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    HALVES: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer's task in an M-ragged pass: of each step rows of `x`, and COLUMNS of `w` (in fc1 of each half)."""
    num_m, num_n, x, w, full, empty = loop
    BYTES: gl.constexpr = (CONSUMERS * ROWS + HALVES * COLUMNS) * BLOCK_K * x.dtype.primitive_bitwidth // 8
    i = 0
    for place in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(place, num_m, num_n, GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        w_e = num_experts - 1 - expert if REVERSED else expert
        wrap, end, row = to_ragged_indices(first, rows, 0)
        n = n_tile * COLUMNS
        for k in range(0, K, BLOCK_K):
            stage = begin_loads(i, full, empty, BYTES, STAGES)
            i += 1
            arrived = full.index(stage)
            for c in gl.static_range(CONSUMERS):
                tma_load(x_desc, [wrap, end, row + c * ROWS, k], arrived, x.index(stage * CONSUMERS + c))
            if HALVES == 2:
                tma_load(w_desc, [w_e, 0, n, k], arrived, w.index(stage))
            elif K_CONTIGUOUS:
                tma_load(w_desc, [w_e, n, k], arrived, w.index(stage))
            else:
                tma_load(w_desc, [w_e, k, n], arrived, w.index(stage))


@gluon.jit
def operands(
    DTYPE: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, K_CONTIGUOUS: gl.constexpr, STAGES: gl.constexpr
):
    """`(x, w, full, empty)` of an M-ragged pass: `[STAGES, ...]` of shared memory, COLUMNS of `w` in all; mbarriers."""
    x = shared_tiles(DTYPE, STAGES * CONSUMERS, ROWS, BLOCK_K)
    w = shared_tiles(DTYPE, STAGES, COLUMNS if K_CONTIGUOUS else BLOCK_K, BLOCK_K if K_CONTIGUOUS else COLUMNS)
    full, empty = mbarriers(STAGES, 1), mbarriers(STAGES, CONSUMERS)
    fence_async_shared()
    return x, w, full, empty


@gluon.jit
def product(
    i,
    K,
    loop,
    WHICH: gl.constexpr,
    N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`(x @ w, next step)` of a consumer's rows of a tile, `[ROWS, N]`, from step i on; `K > 0`."""
    _, _, x, w, full, empty = loop
    acc = sums(N)
    for k in range(0, K, BLOCK_K):
        stage = wait_for_operands(i, full, STAGES)
        w_KN = w.index(stage)
        if K_CONTIGUOUS:
            w_KN = w_KN.permute((1, 0))
        acc = multiply(x.index(stage * CONSUMERS + WHICH), w_KN, acc, i, k == 0, empty, STAGES)
        i += 1
    return finish(acc, i, True, empty, STAGES), i
