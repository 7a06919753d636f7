"""A tile of 16 bits in shared memory, to be quantized both ways by recipe fp8_block: 128 rows, and 64 or 128 columns.

Threads copy it with `cp.async`, 16 bytes each, zeros past the ends: all of a tile is on its way at once, and takes no
registers. First it is read by rows, in 4 parts of 32 rows, and may be overwritten in place. Then it is read by columns:
a thread has neighbouring columns, and 16 neighbouring rows of them, which are 16 bytes of a token copy.

Row s in shared memory is row `16 (s % 8) + s // 8` of the tile. So the eight rows that a warp reads at once by columns,
16 rows apart in the tile, are neighbours, which the swizzle puts into different banks. Accesses by rows have no bank
conflict either, but for channels that alternate, with which the threads that read 64 columns of `d` read two rows at
once.
"""

from ..device.quantization import (
    CHUNK,
    chunk_of_scales,
    in_whole_rows,
    scaled_by_columns,
    store_scales,
    to_e4m3,
)
from ..device.tiles import to_fp32
from .gluon_compat import barrier, copy_async, copy_commit, copy_wait, gl, gluon, reinterpreted
from .subtiles import column_numbers

PARTS = gl.constexpr(4)
ROWS = gl.constexpr(32)  # of a part


@gluon.jit
def staged_tile(DTYPE: gl.constexpr, WIDTH: gl.constexpr):
    """`[PARTS, ROWS, WIDTH]` of shared memory."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    return gl.allocate_shared_memory(DTYPE, [PARTS, ROWS, WIDTH], layout)


@gluon.constexpr_function
def by_rows():
    """The layout in which tiles are copied, and read by rows: 16 bytes a thread, 128 of a row at once."""
    return gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])


@gluon.jit
def _row_of(s):
    """The row of the tile that is row `s` in shared memory."""
    return s % 8 * 16 + s // 8


@gluon.jit
def rows_of_part(part, layout: gl.constexpr):
    """`[ROWS]`: the rows of the tile that a part has."""
    return _row_of(part * ROWS + gl.arange(0, ROWS, layout))


@gluon.jit
def begin_to_copy(tile, ptr, stride, row_ids_ptr, first, rows, column, num_columns):
    """Begin to copy the columns from `column` on of `rows` rows from row `first` of a matrix, or by row ids from there.

    `stride` and `num_columns` are multiples of 16: Triton proves nothing less, and copies of 16 bytes need proof.
    """
    layout: gl.constexpr = by_rows()
    row_M = _row_of(gl.arange(0, CHUNK, gl.SliceLayout(1, layout)))
    mask_M, place_M = row_M < rows, first + row_M
    if row_ids_ptr is not None:
        place_M = gl.load(row_ids_ptr + place_M, mask=mask_M, other=0)
    column_1N = column + gl.arange(0, tile.shape[2], gl.SliceLayout(0, layout))[None, :]
    from_MN = ptr + place_M[:, None].to(gl.int64) * stride + column_1N
    copy_async(_whole(tile), from_MN, mask=mask_M[:, None] & (column_1N < num_columns))


@gluon.jit
def _whole(tile):
    """`[128, WIDTH]`."""
    return reinterpreted(tile, [1, CHUNK, tile.shape[2]]).index(0)


@gluon.jit
def finish_copies():
    """Wait until the copies of all threads have arrived."""
    copy_commit()
    copy_wait(0)
    barrier()


@gluon.jit
def store_by_rows(x_MN, ptr, row_M, first, rows, column, num_columns):
    """Store rows `row` of a tile into `[R, num_columns]`, of which it has `rows` rows from row `first` on."""
    to_M1 = ptr + (first + row_M[:, None]).to(gl.int64) * num_columns
    column_1N = column_numbers(x_MN, column)
    gl.store(to_M1 + column_1N, x_MN, mask=(row_M[:, None] < rows) & (column_1N < num_columns))


@gluon.jit
def store_row_copy(x_MN, copy_ptr, scales_ptr, row_M, m_tile, first, rows, column, num_columns):
    """Quantize rows `row` of a tile, one chunk of columns in fp32, along the columns, and store them in the matrix' own
    rows, `[R, num_columns]`.
    """
    copy, exponent_M = in_whole_rows(x_MN, "fp8_block")
    store_by_rows(copy, copy_ptr, row_M, first, rows, column, num_columns)
    store_scales(chunk_of_scales(scales_ptr, m_tile, column, num_columns), exponent_M, row_M, 0, "fp8_block")


@gluon.jit
def store_token_copy(tile, copy_ptr, scales_ptr, m_tile, column, num_columns):
    """Quantize a staged tile along its rows and store it, transposed: `[tiles, num_columns, 128]`.

    Its columns are those from `column` on, in one chunk; zero past the ends.
    """
    WIDTH: gl.constexpr = tile.shape[2]
    by_columns: gl.constexpr = gl.BlockedLayout([1, WIDTH // 32], [8, 4], [1, 8], [0, 1])
    transposed: gl.constexpr = gl.BlockedLayout([WIDTH // 32, 16], [4, 8], [8, 1], [1, 0])
    x_MN, exponent_N = scaled_by_columns(to_fp32(_whole(tile).load(by_columns)), "fp8_block")
    # Rows in order, which is the opposite of `_row_of`, and moves no value to another thread.
    x_NM = gl.reshape(gl.permute(gl.reshape(x_MN, (16, 8, WIDTH)), (2, 1, 0)), (WIDTH, CHUNK))
    x_NM = gl.convert_layout(x_NM, transposed)
    column_N = column + gl.arange(0, WIDTH, gl.SliceLayout(1, transposed))
    row_1M = gl.arange(0, CHUNK, gl.SliceLayout(0, transposed))[None, :]
    place_NM = (m_tile.to(gl.int64) * num_columns + column_N[:, None]) * CHUNK + row_1M
    gl.store(copy_ptr + place_NM, to_e4m3(x_NM), mask=column_N[:, None] < num_columns)
    line_N = column % CHUNK + gl.arange(0, WIDTH, gl.SliceLayout(0, by_columns))
    store_scales(chunk_of_scales(scales_ptr, m_tile, column, num_columns), exponent_N, line_N, 0, "fp8_block")
