"""The loop over K of an M-ragged pass, for the kernels of gemm, fc1 and dgrad in plain Triton."""

import triton
import triton.language as tl

from .tiles import dot, expert_base, load_rows, load_weight


@triton.jit
def product(
    acc,
    x,
    w,
    tile,
    n,
    end_n,
    K,
    K_CONTIGUOUS: tl.constexpr,
    REVERSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr = 1,
    STEP: tl.constexpr = 1,
):
    """`acc + x @ w[expert, STEP * n:, :]^T` in fp32, for the rows of a tile, `(expert, first row, rows)`; `K > 0`.

    `x`: `(pointer, descriptor, row ids, row stride)`; with row ids, row r is row `row_ids[r]` of `x`.
    `w`: `(pointer, descriptor, table, number of experts, strides)`, for `expert_base` and `load_weight`; REVERSED: the
    descriptor starts at the last expert. Tuples hold no constexpr: Triton would make a run-time value of it.
    """
    x_ptr, x_desc, row_ids_ptr, stride_x_r = x
    w_ptr, w_desc, w_table_ptr, num_experts, stride_w_e, stride_w_n, stride_w_k = w
    expert, first, rows = tile
    BLOCK_N: tl.constexpr = acc.shape[1] // HALVES
    row_M1 = tl.arange(0, acc.shape[0])[:, None]
    mask_M1, x_row_M1 = row_M1 < rows, first + row_M1
    if row_ids_ptr is not None:
        x_row_M1 = tl.load(row_ids_ptr + x_row_M1, mask=mask_M1, other=0)
    x_M1 = x_ptr + x_row_M1.to(tl.int64) * stride_x_r
    base = expert_base(w_ptr, w_table_ptr, stride_w_e, expert, ALIGNED)
    w_e = num_experts - 1 - expert if REVERSED else expert
    for k in range(0, K, BLOCK_K):
        x_MK = load_rows(x_desc, x_M1, first, rows, mask_M1, k, K, BLOCK_K)
        w_KN = load_weight(
            *(w_desc, base, w_e, n * STEP, k, end_n, K, stride_w_n, stride_w_k),
            *(BLOCK_N, BLOCK_K, K_CONTIGUOUS, HALVES),
        )
        acc = dot(x_MK, w_KN, acc, PRECISION)
    return acc
