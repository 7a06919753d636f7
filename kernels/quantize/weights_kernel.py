"""Weights of experts in 8 bits, both ways, in one read: a copy with blocks along their columns and, transposed, one
with blocks along their rows. Where they lie: `kernels/operands/quantized.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.quantization import (
    CHUNK,
    along_columns,
    along_rows_of_32,
    block_of,
    in_one_block,
    power_of_2,
    spread_rows,
    store_scales,
    transposed,
)
from ..device.tiles import INTERPRETED, expert_base, to_fp32


@triton.jit
def _quantize_weights_kernel(
    w_ptr,
    w_table_ptr,
    row_copy_ptr,
    row_scales_ptr,
    column_copy_ptr,
    column_scales_ptr,
    R,
    C,
    stride_w_e,
    stride_w_r,
    stride_w_c,
    ALIGNED: tl.constexpr,
    RECIPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`w` `[E, R, C]`; `row_copy` `[E, R, C]`, with blocks along columns; `column_copy` `[E, C, R]`, with blocks along
    rows. `w_table`: experts' addresses, `[E]` int64. Absent ones are None. A program has 128 rows and one chunk of
    columns, or a part of it.
    """
    num_r, num_chunks = tl.cdiv(R, CHUNK), tl.cdiv(C, CHUNK)
    PARTS: tl.constexpr = CHUNK // BLOCK_C
    program = tl.program_id(0)
    expert, tile = program // (num_chunks * PARTS) // num_r, program // (num_chunks * PARTS) % num_r
    column = program % (num_chunks * PARTS) * BLOCK_C
    line_M, column_N = spread_rows(), column + tl.arange(0, BLOCK_C)
    row_M, row_in_order_M = tile * CHUNK + line_M, tile * CHUNK + tl.arange(0, CHUNK)
    w_M1 = expert_base(w_ptr, w_table_ptr, stride_w_e, expert, ALIGNED) + row_M.to(tl.int64)[:, None] * stride_w_r
    mask = (row_M < R)[:, None] & (column_N < C)[None, :]
    w_MN = _in_16_bits(tl.load(w_M1 + column_N.to(tl.int64)[None, :] * stride_w_c, mask=mask, other=0.0))
    # Place of the 128 x 128 elements among those of `[E, chunks of rows, chunks of columns]`, or the other way round.
    chunk = column // CHUNK
    by_row = (expert.to(tl.int64) * num_r + tile) * num_chunks + chunk
    by_column = (expert.to(tl.int64) * num_chunks + chunk) * num_r + tile
    if RECIPE == "fp8_block":
        copy, exponent = in_one_block(w_MN, RECIPE)
        if row_copy_ptr is not None:
            _store(row_copy_ptr, copy, expert, row_M, column_N, R, C)
            tl.store(row_scales_ptr + by_row, power_of_2(exponent))
        if column_copy_ptr is not None:
            _store(column_copy_ptr, transposed(copy), expert, column_N, row_in_order_M, C, R)
            tl.store(column_scales_ptr + by_column, power_of_2(exponent))
    else:
        # A program that covers a part of a chunk writes the scales of that part.
        BLOCK: tl.constexpr = block_of(RECIPE)
        if row_copy_ptr is not None:
            copy, exponent = along_columns(w_MN, RECIPE)
            _store(row_copy_ptr, copy, expert, row_M, column_N, R, C)
            block_1B = column % CHUNK // BLOCK + tl.arange(0, BLOCK_C // BLOCK)[None, :]
            store_scales(row_scales_ptr + by_column * 512, exponent, line_M[:, None], block_1B, RECIPE)
        if column_copy_ptr is not None:
            copy, exponent = along_rows_of_32(w_MN, RECIPE)
            _store(column_copy_ptr, transposed(copy), expert, column_N, row_in_order_M, C, R)
            block_B1 = tl.arange(0, CHUNK // BLOCK)[:, None]
            store_scales(column_scales_ptr + by_row * 512, exponent, (column_N % CHUNK)[None, :], block_B1, RECIPE)


@triton.jit
def _in_16_bits(w):
    """fp32 of what a layer computes with: 16-bit weights as they are, fp32 ones rounded to bf16."""
    if w.dtype != tl.float32:
        w = to_fp32(w)
    elif INTERPRETED:  # which truncates, and makes zeros of subnormal bfloat16
        bits = w.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        w = tl.where(w == w, rounded, w)
    else:
        w = w.to(tl.bfloat16).to(tl.float32)
    return w


@triton.jit
def _store(copy_ptr, copy_MN, expert, row_M, column_N, num_rows, num_columns):
    """Store a tile of one expert's matrix; all `[num_rows, num_columns]` matrices are contiguous."""
    row_M1 = expert.to(tl.int64) * num_rows + row_M[:, None]
    mask = (row_M < num_rows)[:, None] & (column_N < num_columns)[None, :]
    tl.store(copy_ptr + row_M1 * num_columns + column_N[None, :], copy_MN, mask=mask)
