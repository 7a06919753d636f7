"""Passes (5) and (6): `dw[e, n, k] (+)= sum_r dy[r, n] x[r, k]` over the rows r of expert e.

In the same launch, the programs of the first column tile sum `db[e, n] = sum_r scale[r] dy[r, n]`. Rows may come in
several segments (micro-batches), each with its own `dy`, `x` and row offsets; all are summed before the one read and
write of `dw`. Each element of `dw` belongs to one program: no atomics, the same bits every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .common import dot, expert_base, round_to
from .configs import dot_precision, select
from .expert_tensors import ExpertTensors, address_table


@triton.jit
def _grouped_wgrad_kernel(
    dw_ptr,
    dw_table_ptr,
    db_ptr,
    db_table_ptr,
    dy_ptr,
    x_ptr,
    offsets_ptr,
    segments_ptr,
    scale_ptr,
    num_segments,
    N,
    K,
    stride_dw_e,
    stride_dw_n,
    stride_dw_k,
    stride_db_e,
    stride_dy_r,
    stride_x_r,
    ACCUMULATE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K) if dw_ptr is not None else 1
    expert = tl.program_id(0) // (num_n * num_k)
    k_tile = tl.program_id(0) % num_k
    n = ((tl.program_id(0) // num_k) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = (k_tile * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    n_mask, k_mask = n < N, k < K

    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
    num_rows = 0
    for s in range(0, num_segments):
        dy, x, offsets = dy_ptr, x_ptr, offsets_ptr
        if segments_ptr is not None:
            dy = tl.load(segments_ptr + 3 * s).to(tl.pointer_type(dy_ptr.dtype.element_ty))
            x = tl.load(segments_ptr + 3 * s + 1).to(tl.pointer_type(x_ptr.dtype.element_ty))
            offsets = tl.load(segments_ptr + 3 * s + 2).to(tl.pointer_type(offsets_ptr.dtype.element_ty))
        first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        num_rows += end - first
        for start in range(first, end, BLOCK_R):
            rows = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
            # Both operands are masked: 0 * Inf from a neighbour's row would be NaN.
            row_mask = rows < end
            dy_RN = tl.load(
                dy + rows[:, None] * stride_dy_r + n[None, :], mask=row_mask[:, None] & n_mask[None, :], other=0.0
            )
            if dw_ptr is not None:
                x_RK = tl.load(
                    x + rows[:, None] * stride_x_r + k[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0
                )
                acc = dot(tl.trans(dy_RN), x_RK, acc, PRECISION)
            if db_ptr is not None:
                wide = dy_RN.to(tl.float32)
                if scale_ptr is not None:
                    wide *= tl.load(scale_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
                sums += tl.sum(wide, axis=0)

    if db_ptr is not None:
        db = expert_base(db_ptr, db_table_ptr, stride_db_e, expert)
        tl.store(db + n, round_to(sums, db_ptr.dtype.element_ty), mask=n_mask & (k_tile == 0))
    if dw_ptr is not None:
        dw = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert)
        dw += n[:, None] * stride_dw_n + k[None, :] * stride_dw_k
        mask = n_mask[:, None] & k_mask[None, :]
        if ACCUMULATE:
            mask = mask & (num_rows > 0)
            acc += tl.load(dw, mask=mask, other=0.0).to(tl.float32)
        tl.store(dw, round_to(acc, dw_ptr.dtype.element_ty), mask=mask)


def grouped_wgrad_(
    dw_ENK: ExpertTensors | None,
    db_EN: ExpertTensors | None,
    dy_RN: Sequence[Tensor],
    x_RK: Sequence[Tensor],
    offsets: Sequence[Tensor],
    *,
    accumulate: bool,
    scale_R: Tensor | None = None,
) -> None:
    """Adds to `dw`, or writes it (zeros for experts without rows); writes `db`, for one segment only.

    All segments have contiguous `dy [R_s, N]` and `x [R_s, K]`, and `offsets [E + 1]`. Without `dw`, `x` is unused.
    """
    num_experts, N = offsets[0].shape[0] - 1, dy_RN[0].shape[1]
    K = x_RK[0].shape[1] if dw_ENK else 1
    tile = select("wgrad", dy_RN[0].dtype, dy_RN[0].device, "pointer", dy_RN[0].shape[0] / num_experts)
    segments = None
    if len(dy_RN) > 1:
        addresses = [t.data_ptr() for group in zip(dy_RN, x_RK, offsets, strict=True) for t in group]
        segments = address_table(tuple(addresses), dy_RN[0].device)
    num_k = triton.cdiv(K, tile.BLOCK_K) if dw_ENK else 1
    _grouped_wgrad_kernel[(num_experts * triton.cdiv(N, tile.BLOCK_N) * num_k,)](
        dw_ENK.base if dw_ENK else None,
        dw_ENK.table if dw_ENK else None,
        db_EN.base if db_EN else None,
        db_EN.table if db_EN else None,
        dy_RN[0],
        x_RK[0] if dw_ENK else None,
        offsets[0],
        segments,
        scale_R,
        len(dy_RN),
        N,
        K,
        dw_ENK.stride_e if dw_ENK else 0,
        *(dw_ENK.strides if dw_ENK else (0, 0)),
        db_EN.stride_e if db_EN else 0,
        N,
        K,
        accumulate,
        tile.BLOCK_M,
        tile.BLOCK_N,
        tile.BLOCK_K,
        dot_precision(dy_RN[0].dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
