"""Every token's rows, summed: `out[t] = sum over k of y[rows[t * K + k]]`, in the order of k, in fp32, rounded once.

Used for `y` and, as the opposite of a gather, for `dx`. Rows come from all over `y`, each whole. No addition is atomic:
the same bits every run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device.tiles import round_to
from ..launching import cost, launches
from ..launching.launcher import launch
from ..tiles.configs import cdiv, power_of_2


@triton.jit
def _combine_kernel(
    y_ptr,
    rows_ptr,
    out_ptr,
    K,
    H,
    stride_y_r,
    stride_out_t,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for first in range(0, K, UNROLL):
        # So many rows are on their way at once.
        for k in tl.static_range(UNROLL):
            row = tl.load(rows_ptr + token * K + first + k, mask=first + k < K, other=0).to(tl.int64)
            # A number for each column: Triton 3.9's interpreter makes integers of one condition for all of them.
            used = tl.zeros_like(columns) + (first + k) < K
            sums += tl.load(y_ptr + row * stride_y_r + columns, mask=mask & used, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out_t + columns, round_to(sums, out_ptr.dtype.element_ty), mask=mask)


def combine_(out_TH: Tensor, y_RH: Tensor, rows_R: Tensor) -> None:
    """Writes all of `out`. `rows`: `[T * K]` integers; `out` and `y` have unit column stride."""
    (T, H), K = out_TH.shape, rows_R.shape[0] // max(1, out_TH.shape[0])
    if out_TH.numel() == 0:
        return
    block = min(1024, power_of_2(H))
    unroll = min(8, power_of_2(max(1, K)))
    launch(
        _combine_kernel,
        (T, cdiv(H, block)),
        y_RH,
        rows_R,
        out_TH,
        K,
        H,
        y_RH.stride(0),
        out_TH.stride(0),
        unroll,
        block,
        num_warps=max(1, block // 256),
    )
    launches.report("pointer", lambda: cost.combine(T, K, H, y_RH.element_size()))
