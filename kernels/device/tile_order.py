"""The order of tiles: M-ragged passes compute a tile from its index; wgrad has a list that programs take turns at.

wgrad has equally many tiles for every expert, but a tile's time grows with the rows of its expert. Its list has the
longest first, and programs take their turns in forward, then in reverse order. So all of a program's tiles are known
when it begins, and the first loads of one run under the last stores of the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(-(2**62))  # the place of a row that reads as zeros, in a list of steps


@triton.jit
def tile_at(tile_index, num_m, num_n, GROUP_M: tl.constexpr):
    """`(M-tile, N-tile)` of a tile index, the number in the order of work; on a host, call `tile_at.fn`.

    GROUP_M M-tiles go through the N-tiles together, so that those of one expert find its weight tile in L2. All
    tiles cost the same (rows beyond a group's end are multiplied too), so no order balances better than another.
    """
    first_m = tile_index // (GROUP_M * num_n) * GROUP_M
    size = min(num_m - first_m, GROUP_M)
    within = tile_index % (GROUP_M * num_n)
    return first_m + within % size, within // size


@triton.jit
def load_tile(tiles_ptr, tile):
    """`(expert, first row, rows from there to the end of the expert)` of an M-tile."""
    tile_ptr = tiles_ptr + 3 * (1 + tile)
    first = tl.load(tile_ptr + 1)
    return tl.load(tile_ptr), first, tl.load(tile_ptr + 2) - first


@triton.jit
def zero_padding(y_ptr, tiles_ptr, num_columns, stride_y_r, stride_y_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store zeros in the rows of `y` that no expert owns; all programs of a launch share the work."""
    row_M1, column_1N = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    zero_padding_at(y_ptr, tiles_ptr, num_columns, stride_y_r, stride_y_n, row_M1, column_1N)


@triton.jit
def zero_padding_at(y_ptr, tiles_ptr, num_columns, stride_y_r, stride_y_n, row_M1, column_1N):
    """`zero_padding` by the given rows and columns at once, numbered from 0."""
    owned, used = tl.load(tiles_ptr), tl.load(tiles_ptr + 1)
    for tile in range(owned + tl.program_id(0), used, tl.num_programs(0)):
        _, first, num_rows = load_tile(tiles_ptr, tile)
        y_M1 = y_ptr + (first + row_M1).to(tl.int64) * stride_y_r
        for n in range(0, num_columns, column_1N.shape[1]):
            column = (n + column_1N).to(tl.int64)
            tl.store(y_M1 + column * stride_y_n, 0.0, mask=(row_M1 < num_rows) & (column < num_columns))


def deals_out(tiles: int, programs: int) -> bool:
    """Whether wgrad's list, with `tiles` tiles of each expert, is dealt out to persistent programs.

    If not, each tile has a program of its own, and the first free multiprocessor takes the next. That is so if one tile
    of an expert with a fifth of all rows takes longer than the mean program.
    """
    return 5 * tiles >= programs


@triton.jit
def tile_index_at(turn, program, programs):
    """Index in wgrad's list of the tile that a program takes in a turn: there and back, so that a program with the
    longest of one turn has the shortest of the next. Plain arithmetic, like the others here: `tile_index_at.fn` runs on
    a host.
    """
    return turn * programs + program + turn % 2 * (programs - 1 - 2 * program)


@triton.jit
def num_turns(length, program, programs):
    """Number of tiles that a program takes from a list of `length`."""
    full = length // programs
    last = program + full % 2 * (programs - 1 - 2 * program)
    return full + min(max(length % programs - last, 0), 1)


@triton.jit
def wgrad_tile(tile_index, num_n, num_k, GROUP_N):
    """`(rank of the expert, row tile, column tile)` of a tile index in wgrad's list.

    Tiles that run at the same time should share operands in L2, so an expert's tiles come in groups of GROUP_N rows
    by all columns, column by column. Plain arithmetic: `wgrad_tile.fn` runs on the host.
    """
    tiles_per_expert = num_n * num_k
    within = tile_index % tiles_per_expert
    group = within // (GROUP_N * num_k)
    rows = min(num_n - group * GROUP_N, GROUP_N)
    within = within % (GROUP_N * num_k)
    return tile_index // tiles_per_expert, group * GROUP_N + within % rows, within // rows


@triton.jit
def load_step(steps_ptr, segments_ptr, step, num_segments, num_experts):
    """Step of `wgrad/steps.py`: `(first row, rows from there on, left base, right base)`, as integers."""
    step_ptr = steps_ptr + num_experts + 1 + 3 * step
    left_ptr = segments_ptr + num_segments + tl.load(step_ptr)
    return tl.load(step_ptr + 1), tl.load(step_ptr + 2), tl.load(left_ptr), tl.load(left_ptr + 2 * num_segments)
