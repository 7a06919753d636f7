"""A ring of stages of operands, which one partition of a warp-specialized kernel fills and others multiply.

Every stage has two mbarriers. `full`: its operands have arrived (the producer arrives once, and TMA with the bytes).
`empty`: they have been multiplied, by both consumers where two multiply. Step i of a program, counted over all its
tiles, uses stage `i % STAGES` in round `i // STAGES`, so each side waits for a parity and counts nothing else. A wait
for parity 1 on a new mbarrier passes, so the first STAGES loads do not wait. The producer runs ahead by up to STAGES
steps, into the next tile, while consumers still write the last one.

docs/warp_specialized.md derives that no wait is for ever and nothing is overwritten while it is read. That relies on
this: one thread arrives for a partition, after a barrier of all its warps (`bar.sync`), which the compiler adds.
"""

from .gluon_compat import barrier, fence_async_shared, gl, gluon, mbarrier, tma_store_wait


@gluon.jit
def mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT mbarriers, each expecting ARRIVALS arrivals. Call `fence_async_shared` before they are used."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def shared_tiles(DTYPE: gl.constexpr, COUNT: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """`[COUNT, M, N]` of shared memory as TMA and MMAs need it, swizzled as `Descriptor.described` tells TMA."""
    WIDTH: gl.constexpr = N * DTYPE.primitive_bitwidth // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if WIDTH > 128 else WIDTH, element_bitwidth=DTYPE.primitive_bitwidth, rank=2
    )
    return gl.allocate_shared_memory(DTYPE, [COUNT, M, N], layout)


@gluon.jit
def begin_loads(i, full, empty, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Producer: wait until the stage of step i is free, announce BYTES, return the stage."""
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@gluon.jit
def wait_for_operands(i, full, STAGES: gl.constexpr):
    """Consumer: wait for the operands of step i, return their stage."""
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    return stage


@gluon.jit
def load_row_ids(row_ids_ptr, rows, ROWS: gl.constexpr):
    """`[ROWS]` row ids as `tma_gather` needs them: every thread of a warp has the ids of all rows that the warp loads.
    From `rows` on they are -1, for which TMA loads zeros.
    """
    layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
    row_M = gl.arange(0, ROWS, layout)
    return gl.load(row_ids_ptr + row_M, mask=row_M < rows, other=-1).to(gl.int32)


@gluon.jit
def row_numbers(tile, row):
    """`[M]` row numbers of a tile's elements, in the tile's layout: one for each thread and row. With `[M, 1]`, a
    thread would load and store one for each of its columns.
    """
    layout: gl.constexpr = tile.type.layout
    return row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))


@gluon.jit
def column_numbers(tile, column):
    """`[1, N]` column numbers of a tile's elements, in the tile's layout."""
    layout: gl.constexpr = tile.type.layout
    return (column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout)))[None, :]


@gluon.jit
def load_for_rows(ptr, tile, row, rows):
    """`[M, 1]` in fp32: a value for each of a tile's rows, which begin at `row`; zeros from `rows` on."""
    row_M = row_numbers(tile, row)
    return gl.load(ptr + row_M, mask=row_M < rows, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def row_zeros(tile):
    """`[M]` zeros, one for each of a tile's rows, in the tile's layout."""
    layout: gl.constexpr = tile.type.layout
    return gl.zeros((tile.shape[0],), gl.float32, gl.SliceLayout(1, layout))


@gluon.jit
def whole_rows(M: gl.constexpr):
    """`([M, 1], [1, 64])` row and column numbers of tiles that all warps of the partition write row by row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    return rows[:, None], columns[None, :]


@gluon.jit
def spread_by_rows(tile):
    """The tile in a layout where neighbouring threads have neighbouring columns, for accesses to global memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    return gl.convert_layout(tile, layout)


@gluon.jit
def overwrite(buffer, tile, RUNNING: gl.constexpr):
    """Wait until at most RUNNING of this consumer's stores still read, then write a buffer, from which TMA may store.

    From one write of a buffer to the next there must be at least RUNNING + 1 stores, its own included.
    """
    tma_store_wait(RUNNING)
    barrier()  # for all threads, as only those that store have waited
    write(buffer, tile)


@gluon.jit
def write(buffer, tile):
    """Write a buffer that no store reads any more, from which TMA may store."""
    buffer.store(tile)
    fence_async_shared()
    barrier()
