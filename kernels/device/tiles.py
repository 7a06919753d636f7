"""Device functions that every kernel shares."""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda
from triton.tools.ragged_tma import load_ragged, to_ragged_indices

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


# PTX that makes fp32 of the two 16-bit values in one register.
_UNPACK_BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_UNPACK_FP16 = tl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)


@triton.jit
def to_fp32(value):
    """A float of at most 32 bits in fp32, exactly.

    On NVIDIA, 16-bit values are taken in pairs: ptxas moves the upper bfloat16 down before it shifts it up, and LLVM
    rounds in pairs only if both values of one are used together. The interpreter makes zeros of subnormal bfloat16, so
    there the bits are moved.
    """
    if INTERPRETED and value.dtype == tl.bfloat16:
        value = (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif is_cuda() and value.dtype.primitive_bitwidth == 16:
        UNPACK: tl.constexpr = _UNPACK_BF16 if value.dtype == tl.bfloat16 else _UNPACK_FP16
        value = tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [value], dtype=tl.float32, is_pure=True, pack=2)
    return value.to(tl.float32)


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, size, FLATTEN: tl.constexpr):
    """Accumulator of a tile before its first MMA, `[M, N]`.

    On sm_90 with FLATTEN the zero is `size >> 31`, as ptxas would make two instructions of each register's constant
    zero. `size`: in `[0, 2^31)`, which the compiler does not know.
    """
    if FLATTEN and cuda_capability_geq(9) and not cuda_capability_geq(10):
        acc = tl.full((M, N), (size >> 31).to(tl.float32, bitcast=True), dtype=tl.float32)
    else:
        acc = tl.zeros((M, N), dtype=tl.float32)
    return acc


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
def load_rows(desc, ptr_M1, first, num_rows, mask_M1, column, num_columns, BLOCK: tl.constexpr):
    """`[M, BLOCK]` of the rows from `first`, zero past `num_rows` of them and past the last column.

    Through a ragged descriptor if there is one, else from the row pointers `ptr_M1` where `mask_M1`.
    """
    if desc is not None:
        tile = load_ragged(desc, first, num_rows, [0, column])
    else:
        columns = (column + tl.arange(0, BLOCK))[None, :]
        tile = tl.load(ptr_M1 + columns, mask=mask_M1 & (columns < num_columns), other=0.0)
    return tile


@triton.jit
def store_rows(desc, ptr_M1, first, num_rows, mask_M1, column, num_columns, tile_MN):
    """The opposite of `load_rows`."""
    if desc is not None:
        far, slot, row = to_ragged_indices(first, num_rows, 0)
        desc.store([far, slot, row, column], tl.reshape(tile_MN, (1, 1, tile_MN.shape[0], tile_MN.shape[1])))
    else:
        columns = (column + tl.arange(0, tile_MN.shape[1]))[None, :]
        tl.store(ptr_M1 + columns, tile_MN, mask=mask_M1 & (columns < num_columns))


@triton.jit
def store_halves(desc, ptr_M1, first, num_rows, mask_M1, column, num_columns, left_MN, right_MN):
    """`store_rows` at the same columns of both halves of a row, `num_columns` each: one store if `desc` has a dimension
    for them, `[..., R, 2, N]`.
    """
    if desc is not None:
        far, slot, row = to_ragged_indices(first, num_rows, 0)
        both_M2N = tl.permute(tl.join(left_MN, right_MN), (0, 2, 1))
        desc.store([far, slot, row, 0, column], tl.reshape(both_M2N, (1, 1, left_MN.shape[0], 2, left_MN.shape[1])))
    else:
        store_rows(desc, ptr_M1, first, num_rows, mask_M1, column, num_columns, left_MN)
        store_rows(desc, ptr_M1 + num_columns, first, num_rows, mask_M1, column, num_columns, right_MN)


@triton.jit
def load_weight(
    desc,
    ptr,
    expert,
    n,
    k,
    end_n,
    end_k,
    stride_n,
    stride_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    HALVES: tl.constexpr = 1,
):
    """`[BLOCK_K, BLOCK_N]` of one expert's `w[n, k]` from row `n` and column `k` on, zero past the ends.

    `desc` describes the weights as they lie, `[E, N, K]` (K_CONTIGUOUS) or `[E, K, N]`; an `expert` that it does not
    have reads as zeros. Without it, `ptr` is the expert's own base. With two HALVES of `end_n` rows each, load the same
    rows of both, side by side: `[BLOCK_K, 2 * BLOCK_N]`, by a `desc` of `[E, 2, N, K]`.
    """
    if desc is None:
        column = tl.arange(0, HALVES * BLOCK_N)
        if HALVES == 2:
            half, column = column // BLOCK_N, column % BLOCK_N
        ns = (n + column).to(tl.int64)[None, :]
        ks = (k + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
        rows = ns + (half * end_n)[None, :] if HALVES == 2 else ns
        tile = tl.load(ptr + ks * stride_k + rows * stride_n, mask=(ks < end_k) & (ns < end_n), other=0.0)
    elif HALVES == 2:
        tile = tl.reshape(desc.load([expert, 0, n, k]), (2 * BLOCK_N, BLOCK_K)).T
    elif K_CONTIGUOUS:
        tile = tl.reshape(desc.load([expert, n, k]), (BLOCK_N, BLOCK_K)).T
    else:
        tile = tl.reshape(desc.load([expert, k, n]), (BLOCK_K, BLOCK_N))
    return tile


@triton.jit
def load_bias(ptr, column_1N, num_columns):
    """`[1, N]` fp32: one expert's bias at these columns, zero past the last one."""
    return tl.load(ptr + column_1N, mask=column_1N < num_columns, other=0.0).to(tl.float32)


@triton.jit
def column_subtiles(tile_MN, SUBTILES: tl.constexpr):
    """Tuple of SUBTILES tiles of neighbouring columns: an epilogue that takes them one by one spills nothing."""
    M: tl.constexpr = tile_MN.shape[0]
    N: tl.constexpr = tile_MN.shape[1]
    if SUBTILES == 1:
        subtiles = (tile_MN,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile_MN, (M, 2, N // 2)), (0, 2, 1)))
        subtiles = column_subtiles(left, SUBTILES // 2) + column_subtiles(right, SUBTILES // 2)
    return subtiles


@triton.jit
def side_by_side(left_MN, right_MN):
    """`[M, 2 N]`: the opposite of `column_subtiles` with two of them."""
    M: tl.constexpr = left_MN.shape[0]
    N: tl.constexpr = left_MN.shape[1]
    return tl.reshape(tl.permute(tl.join(left_MN, right_MN), (0, 2, 1)), (M, 2 * N))
