"""Device functions that every kernel shares."""

import triton
import triton.language as tl

# Whether kernels run under the CPU interpreter; decided when they are defined.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """`acc + a @ b` in fp32. The interpreter's own product of bfloat16 is wrong, so it gets fp32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """fp32 to the nearest DTYPE. The interpreter truncates to bfloat16, so there it is rounded first."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def expert_base(ptr, table_ptr, stride_e, expert, ALIGNED: tl.constexpr = False):
    """Where one expert's tensor starts: at a uniform stride, or at an address in a table of int64.

    ALIGNED: all addresses in the table are multiples of 16 bytes, without which loads would not be vectors.
    """
    if table_ptr is None:
        base = ptr + expert.to(tl.int64) * stride_e
    else:
        base = tl.load(table_ptr + expert).to(tl.pointer_type(ptr.dtype.element_ty))
        if ALIGNED:
            base = tl.multiple_of(base, 16)
    return base


@triton.jit
def load_tile(tiles_ptr, num_tiles, tile):
    """`(expert, first row, end row)` of an M-tile; expert -1: unused, E: padding rows. See `schedule.py`."""
    expert = tl.load(tiles_ptr + tile)
    first = tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    return expert, first, end
