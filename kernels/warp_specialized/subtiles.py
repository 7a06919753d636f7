"""Finished subtiles of a consumer: numbers of their rows and columns, values for their rows, stores by TMA."""

from .gluon_compat import barrier, fence_async_shared, gl, gluon, tma_store_wait


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


class WithoutBegin:
    """An epilogue that has nothing to do before the first tile."""

    @gluon.jit
    def begin(self, walk, CONSUMER: gl.constexpr):
        """Do nothing."""
