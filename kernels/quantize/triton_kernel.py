"""A matrix in 8 bits, both ways, in one read: a copy with blocks along its columns, for products over them, and one
with blocks along the rows of an expert, for wgrad. Where they lie: `kernels/operands/quantized.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.quantization import CHUNK, rows_of_tile, store_row_copy, store_token_copy
from ..device.tile_order import load_tile
from ..device.tiles import load_rows, to_fp32


@triton.jit
def _quantize_kernel(
    x_ptr,
    row_ids_ptr,
    row_copy_ptr,
    row_scales_ptr,
    token_copy_ptr,
    token_scales_ptr,
    tiles_ptr,
    C,
    stride_x_r,
    RECIPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`x` `[R, C]`, or `[T, C]` with `row_ids` `[R]`: row r is `x[row_ids[r]]`. `tiles`: a plan's table of tiles.

    Absent copies are None.
    """
    num_m, num_c = tl.load(tiles_ptr), tl.cdiv(C, CHUNK) * (CHUNK // BLOCK_C)
    tile, column = tl.program_id(0) // num_c, tl.program_id(0) % num_c * BLOCK_C
    # Programs cover whole chunks: scales past the last column are multiplied by zeros, so they must not be NaN. Each
    # program has one tile: a loop over tiles would take half as many registers again.
    if tile < num_m:
        _, first, rows = load_tile(tiles_ptr, tile)
        row_M = rows_of_tile(RECIPE)
        mask_M1, x_row_M1 = row_M[:, None] < rows, first + row_M[:, None]
        if row_ids_ptr is not None:
            x_row_M1 = tl.load(row_ids_ptr + x_row_M1, mask=mask_M1, other=0)
        x_M1 = x_ptr + x_row_M1.to(tl.int64) * stride_x_r
        x_MC = to_fp32(load_rows(None, x_M1, first, rows, mask_M1, column, C, BLOCK_C))
        if row_copy_ptr is not None:
            store_row_copy(row_copy_ptr, row_scales_ptr, x_MC, row_M, tile, first, rows, column, C, RECIPE)
        if token_copy_ptr is not None:
            store_token_copy(token_copy_ptr, token_scales_ptr, x_MC, tile, column, C, RECIPE)
