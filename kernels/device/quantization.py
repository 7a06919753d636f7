"""Blocks of e4m3 with the scales and elements of `operators/torch_quantize.py`, bit for bit, and where copies lie.

The scale of a block is the least power of two, s, with amax / s <= 448. It is derived from the bits of amax in
integers: no division is rounded, and no subnormal number is flushed. `tests/kernels/test_quantize.py` compares it with
PyTorch's definitions, which divide and multiply.

A tile has 128 rows of one expert, a chunk 128 columns.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..operands import quantized
from .tiles import INTERPRETED, store_rows

CHUNK = tl.constexpr(quantized.CHUNK)  # also the rows of a tile
_MAX = tl.constexpr(448.0)  # the largest finite e4m3
_INFINITY = tl.constexpr(0x7F800000)  # bits of fp32
_QUIET_NAN = tl.constexpr(0x7FC00000)


@triton.constexpr_function
def block_of(recipe):
    """Number of elements that share a scale."""
    return 32 if recipe == "mxfp8" else 128


@triton.constexpr_function
def exponent_of_zeros(recipe):
    """The exponent of the scale of zeros, plus 127, as `_exponent` has it."""
    return 0 if recipe == "mxfp8" else 127


@triton.jit
def rows_of_tile(RECIPE: tl.constexpr):
    """The rows of a tile in the order in which `store_token_copy` takes them, `[128]`: the first row of every block,
    the second of every block, and so on.

    Lanes and warps divide neighbouring rows of a tensor among them. In this order each thread has several rows of one
    block, and finds most of amax in registers.
    """
    BLOCK: tl.constexpr = block_of(RECIPE)
    place = tl.arange(0, CHUNK)
    return place % (CHUNK // BLOCK) * BLOCK + place // (CHUNK // BLOCK)


@triton.jit
def _amax(x, axis: tl.constexpr):
    """The largest magnitude along an axis; NaN only where all elements are."""
    size = tl.abs(x)
    if INTERPRETED:
        size = tl.where(size == size, size, 0.0)  # numpy warns where all are NaN
    return tl.max(size, axis)


@triton.jit
def _exponent(amax, RECIPE: tl.constexpr):
    """The exponent of the scale, plus 127. For mxfp8 this is the E8M0 byte. 0 stands for 2^-127, subnormal in fp32."""
    bits = amax.to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2^8. Adding 2^21 - 1 carries into the exponent if the mantissa is more than 1.75.
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)
    if RECIPE == "mxfp8":
        # The definition is amax * (1 / 448) in fp32, rounded up. For the number after 448 * 2^-127 that product is
        # subnormal and rounds to 2^-127; of all others, no product falls to the next lower power of two.
        exponent = tl.where(bits == 0x04600001, 0, exponent)
        exponent = tl.where(bits == _INFINITY, 254, exponent)
        exponent = tl.where(bits > _INFINITY, 0, exponent)
    else:
        exponent = tl.where((bits == 0) | (bits >= _INFINITY), 127, exponent)
    return exponent


@triton.jit
def power_of_2(exponent):
    """2^(exponent - 127) in fp32, for exponents from 0 to 254."""
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """fp32 to the nearest e4m3, ties to even. What is beyond 448 becomes 448, infinities too; one NaN, without a sign.

    The interpreter's own conversion loses carries, so there it is made of integers.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
        normal = (size + 0x7FFFF + ((size >> 20) & 1) >> 20) - (120 << 3)
        subnormal = (size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        byte = tl.where(size < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # below 2^-6
        byte = tl.where((bits & 0x7FFFFFFF) > _INFINITY, 0x7F, byte)
        x = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        if not is_cuda():  # where the instruction's result beyond 448 depends on a mode, and NaN keeps its sign
            nan = tl.full(x.shape, _QUIET_NAN, tl.int32).to(tl.float32, bitcast=True)
            x = tl.where(x == x, tl.minimum(tl.maximum(x, -_MAX), _MAX), nan)
        x = x.to(tl.float8e4nv)
    return x


@triton.jit
def along_columns(x_MN, RECIPE: tl.constexpr):
    """`(copy, exponent)`: fp32 `x` quantized in blocks along its columns, `[M, N]`; exponents of the scales, plus 127,
    `[M, N // block]`.
    """
    M: tl.constexpr = x_MN.shape[0]
    N: tl.constexpr = x_MN.shape[1]
    BLOCK: tl.constexpr = block_of(RECIPE)
    blocks = tl.reshape(x_MN, (M, N // BLOCK, BLOCK))
    exponent = _exponent(_amax(blocks, 2), RECIPE)
    return to_e4m3(tl.reshape(blocks * power_of_2(254 - exponent)[:, :, None], (M, N))), exponent


@triton.jit
def in_whole_rows(x_MN, RECIPE: tl.constexpr):
    """`along_columns` for blocks that are the whole rows of `x`: exponents `[M]`."""
    exponent = _exponent(_amax(x_MN, 1), RECIPE)
    return to_e4m3(x_MN * power_of_2(254 - exponent)[:, None]), exponent


@triton.jit
def scaled_by_columns(x_MN, RECIPE: tl.constexpr):
    """`(x / scale, exponent)` for blocks that are the whole columns of `x`, in fp32, for `to_e4m3`; exponents `[N]`."""
    exponent = _exponent(_amax(x_MN, 0), RECIPE)
    return x_MN * power_of_2(254 - exponent)[None, :], exponent


@triton.jit
def in_one_block(x_MN, RECIPE: tl.constexpr):
    """`along_columns` for one block that is all of `x`: a scalar exponent."""
    exponent = _exponent(tl.max(_amax(x_MN, 1), 0), RECIPE)
    return to_e4m3(x_MN * power_of_2(254 - exponent)), exponent


@triton.jit
def spread_rows():
    """The rows of a tile in the order in which `along_rows_of_32` and `transposed` take them, `[128]`: every fourth
    row, then the rows after these, and so on.

    In the layout in which Triton loads a tile, each thread then has four neighbouring rows, so bytes of the transposed
    tile move in words; and four warps have a block of 32 rows each, so they find amax without shared memory.
    """
    place = tl.arange(0, CHUNK)
    return place % (CHUNK // 4) * 4 + place // (CHUNK // 4)


@triton.jit
def along_rows_of_32(x_MN, RECIPE: tl.constexpr):
    """`along_columns` for blocks of 32 along `spread_rows`: exponents `[4, N]`."""
    N: tl.constexpr = x_MN.shape[1]
    blocks = tl.reshape(x_MN, (4, CHUNK // 32, 8, N))
    exponent = _exponent(_amax(_amax(blocks, 0), 1), RECIPE)
    return to_e4m3(tl.reshape(blocks * power_of_2(254 - exponent)[None, :, None, :], (CHUNK, N))), exponent


@triton.jit
def transposed(x_MN):
    """`[N, 128]`: a tile of `spread_rows`, transposed, with the rows in order."""
    N: tl.constexpr = x_MN.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x_MN, (4, CHUNK // 4, N)), (2, 1, 0)), (N, CHUNK))


@triton.jit
def store_row_copy(copy_ptr, scales_ptr, x_MN, row_M, tile, first, rows, column, num_columns, RECIPE: tl.constexpr):
    """Quantize fp32 `x` in blocks along its columns, and store it in the matrix' own rows, `[R, num_columns]`.

    `x`: rows `row` of a tile, which has `rows` rows from row `first` of the matrix on, and columns from `column` on, in
    one chunk; zero past the ends. Scales: see `store_scales`.
    """
    N: tl.constexpr = x_MN.shape[1]
    BLOCK: tl.constexpr = block_of(RECIPE)
    copy, exponent = along_columns(x_MN, RECIPE)
    copy_M1 = copy_ptr + (first + row_M[:, None]).to(tl.int64) * num_columns
    store_rows(None, copy_M1, first, rows, row_M[:, None] < rows, column, num_columns, copy)
    chunk_ptr = chunk_of_scales(scales_ptr, tile, column, num_columns)
    block_1B = column % CHUNK // BLOCK + tl.arange(0, N // BLOCK)[None, :]
    store_scales(chunk_ptr, exponent, row_M[:, None], block_1B, RECIPE)


@triton.jit
def store_token_copy(copy_ptr, scales_ptr, x_MN, tile, column, num_columns, RECIPE: tl.constexpr):
    """Quantize fp32 `x` in blocks along its rows, and store it by tile: `[tiles, 128, num_columns]` or, for fp8_block,
    transposed, `[tiles, num_columns, 128]`.

    `x`: all of `rows_of_tile`, and columns from `column` on, in one chunk; zero past the ends. Scales: see
    `store_scales`.
    """
    N: tl.constexpr = x_MN.shape[1]
    BLOCK: tl.constexpr = block_of(RECIPE)
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    blocks = tl.reshape(x_MN, (BLOCK, BLOCKS, N))
    exponent = _exponent(_amax(blocks, 0), RECIPE)
    copy = to_e4m3(tl.reshape(blocks * power_of_2(254 - exponent)[None, :, :], (CHUNK, N)))
    row_M, column_N = rows_of_tile(RECIPE), column + tl.arange(0, N)
    mask_N = column_N < num_columns
    if RECIPE == "mxfp8":
        place = (tile.to(tl.int64) * CHUNK + row_M)[:, None] * num_columns + column_N[None, :]
        tl.store(copy_ptr + place, copy, mask=mask_N[None, :])
    else:
        place = (tile.to(tl.int64) * num_columns + column_N)[:, None] * CHUNK + row_M[None, :]
        tl.store(copy_ptr + place, tl.trans(copy), mask=mask_N[:, None])
    chunk_ptr = chunk_of_scales(scales_ptr, tile, column, num_columns)
    store_scales(chunk_ptr, exponent, (column_N % CHUNK)[None, :], tl.arange(0, BLOCKS)[:, None], RECIPE)


@triton.jit
def chunk_of_scales(scales_ptr, tile, column, num_columns):
    """Where the 512 bytes of scales of a tile and a chunk are: fp32 or bytes."""
    ELEMENTS: tl.constexpr = 4096 // scales_ptr.dtype.element_ty.primitive_bitwidth
    return scales_ptr + (tile.to(tl.int64) * tl.cdiv(num_columns, CHUNK) + column // CHUNK) * ELEMENTS


@triton.jit
def store_scales(chunk_ptr, exponent, line, block, RECIPE: tl.constexpr):
    """Store scales of 128 lines (rows of a row copy, columns of a token copy) with blocks along them.

    fp8_block: `[128]` fp32. mxfp8: E8M0 as `tcgen05.cp` copies it, `[32, 4, 4]`: block b of line l is at `[l % 32, l //
    32, b]`. Scales past the ends are those of zeros.
    """
    if RECIPE == "mxfp8":
        tl.store(chunk_ptr + line % 32 * 16 + line // 32 * 4 + block, exponent.to(tl.uint8))
    else:
        tl.store(chunk_ptr + line + block, power_of_2(exponent))
