"""`triton_kernel.py` for recipe fp8_block on Hopper, from a tile in shared memory: see `warp_specialized/staged.py`.

A program of `triton_kernel.py` holds a tile in registers, and moves it through shared memory for the token copy, with
bank conflicts. Here the tile is written to shared memory once and read twice, without conflicts.
"""

from ..device.quantization import CHUNK
from ..device.tile_order import load_tile
from ..device.tiles import to_fp32
from ..warp_specialized.gluon_compat import gl, gluon
from ..warp_specialized.staged import (
    PARTS,
    begin_to_copy,
    by_rows,
    finish_copies,
    rows_of_part,
    staged_tile,
    store_row_copy,
    store_token_copy,
)


@gluon.jit
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
):
    """Arguments as in the Triton kernel; `x` has 16 bits, and C and its stride are multiples of 16."""
    num_c = gl.cdiv(C, CHUNK)
    m_tile, column = gl.program_id(0) // num_c, gl.program_id(0) % num_c * CHUNK
    if m_tile < gl.load(tiles_ptr):
        _, first, rows = load_tile(tiles_ptr, m_tile)
        tile = staged_tile(x_ptr.dtype.element_ty, CHUNK)
        begin_to_copy(tile, x_ptr, stride_x_r, row_ids_ptr, first, rows, column, C)
        finish_copies()
        if row_copy_ptr is not None:
            layout: gl.constexpr = by_rows()
            for part in range(PARTS):
                row_M = rows_of_part(part, gl.SliceLayout(1, layout))
                x_MN = to_fp32(tile.index(part).load(layout))
                store_row_copy(x_MN, row_copy_ptr, row_scales_ptr, row_M, m_tile, first, rows, column, C)
        store_token_copy(tile, token_copy_ptr, token_scales_ptr, m_tile, column, C)
