"""Loads of rows in wgrad, where an operand may lie in several segments (micro-batches), each at its own address.

One descriptor, made on the host, serves all segments, so that no program builds any. It starts at the lowest segment
and has one dimension more than that of `triton.tools.ragged_tma`, whose stride, `unit`, divides every distance between
segments. A segment is the coordinate `distance / unit` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged, to_ragged_indices

from ..device.tile_order import NOWHERE
from ..operands.arrays import Array
from ..operands.descriptors import MAX_COORDINATE, MAX_ROWS, Descriptor, fits, ragged_rows


@triton.jit
def load_rows_of(
    desc, base, row_ids_ptr, first, size, start, column, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`[ROWS, COLUMNS]` from row `start` of a group of `size` rows; zeros beyond the group and beyond the columns.

    `base`: with a descriptor, None or the segment's coordinate; without, a pointer. `row_ids_ptr`, only without a
    descriptor: row r is row `row_ids[r]` of `base`; ids beyond the group are not read.
    """
    if desc is None:
        rows = (first + start + tl.arange(0, ROWS)).to(tl.int64)
        columns = column + tl.arange(0, COLUMNS)
        mask_R = rows < first + size
        if row_ids_ptr is not None:
            rows = tl.load(row_ids_ptr + rows, mask=mask_R, other=0).to(tl.int64)
        mask = mask_R[:, None] & (columns < num_columns)[None, :]
        tile = tl.load(base + rows[:, None] * num_columns + columns[None, :], mask=mask, other=0.0)
    elif base is None:
        tile = load_ragged(desc, first, size, [start, column])
    else:
        wrap, end, row = to_ragged_indices(first, size, start)
        tile = tl.reshape(desc.load([wrap, end, base, row, column]), (ROWS, COLUMNS))
    return tile


@triton.jit
def load_rows_of_step(
    desc,
    like_ptr,
    places_ptr,
    step,
    base,
    first,
    size,
    column,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Without `places`: rows from `first` on of the segment at `base` (ALIGNED: to 16 bytes), as `load_rows_of`. With
    `places` `[steps, ROWS]`: row i of the step starts `places[step, i] * VECTOR` elements after `like_ptr`.
    """
    if places_ptr is not None:
        place_R = tl.load(places_ptr + step.to(tl.int64) * ROWS + tl.arange(0, ROWS))
        columns = column + tl.arange(0, COLUMNS)
        mask = (place_R > NOWHERE)[:, None] & (columns < num_columns)[None, :]
        tile = tl.load(like_ptr + place_R[:, None] * VECTOR + columns[None, :], mask=mask, other=0.0)
    elif desc is not None:
        tile = load_rows_of(desc, base.to(tl.int32), None, first, size, 0, column, num_columns, ROWS, COLUMNS)
    else:
        base_ptr = base.to(tl.pointer_type(like_ptr.dtype.element_ty))
        if ALIGNED:
            base_ptr = tl.multiple_of(base_ptr, 16)
        tile = load_rows_of(None, base_ptr, None, first, size, 0, column, num_columns, ROWS, COLUMNS)
    return tile


def one_descriptor(segments_RC: Sequence[Array], rows: int, columns: int) -> tuple[Descriptor, list[int]] | None:
    """A descriptor of all segments, for tiles of `[rows, columns]`, and each segment's coordinate; None: impossible."""
    filled = [t for t in segments_RC if t.shape[0] > 0]  # nothing is read of the others
    if not filled or not all(fits(t) and t.shape[0] <= MAX_ROWS for t in filled):
        return None
    if len(segments_RC) == 1:
        return ragged_rows(filled[0], rows, columns), [0]
    lowest = min(filled, key=lambda t: t.distance)
    distances = [t.distance for t in segments_RC]
    unit = gcd(2**20, *distances)  # bytes; at least 16, as every address is a multiple of that
    if max(distances) // unit >= MAX_COORDINATE:
        return None
    # The rows of a contiguous tensor are as far apart as it is wide, but if it has one row PyTorch keeps any stride.
    stride = max(filled, key=lambda t: t.shape[0]).strides[0]
    shape = MAX_COORDINATE, MAX_COORDINATE, MAX_COORDINATE, MAX_ROWS, lowest.shape[1]
    strides = 2**34 - stride, stride, unit // lowest.dtype.itemsize, stride, 1
    return Descriptor(lowest, shape, strides, (1, 1, 1, rows, columns)), [d // unit for d in distances]
