"""Sum of every token's rows: `out[t] = sum over k of y[places[t * K + k]]`, in the order of k, in fp32, rounded once.

Used for `y` and, as the opposite of a gather, for `dx`. Rows lie anywhere in `y`; each is read whole. No addition is
atomic: the same bits every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.tiles import round_to
from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands.arrays import Array
from ..tiles.rounding import cdiv, power_of_2


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
    """`y` `[R, H]`, `rows` `[T * K]` integers, `out` `[T, H]`; one program for each token and BLOCK_H columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for first in range(0, K, UNROLL):
        # UNROLL rows are loaded at once.
        for k in tl.static_range(UNROLL):
            row = tl.load(rows_ptr + token * K + first + k, mask=first + k < K, other=0).to(tl.int64)
            # A number for each column: Triton 3.9's interpreter makes integers of one condition for all of them.
            used = tl.zeros_like(columns) + (first + k) < K
            acc += tl.load(y_ptr + row * stride_y_r + columns, mask=mask & used, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out_t + columns, round_to(acc, out_ptr.dtype.element_ty), mask=mask)


@Launcher
def combine_(builder: Builder, out_TH: Array, y_RH: Array, places_R: Array) -> None:
    """Writes all of `out`. `places`: `[T * K]` integers; `out` and `y` have unit column stride."""
    (T, H), K = out_TH.shape, places_R.shape[0] // max(1, out_TH.shape[0])
    if not T * H:
        return
    block = min(1024, power_of_2(H))
    arguments = {
        "y_ptr": y_RH,
        "rows_ptr": places_R,
        "out_ptr": out_TH,
        "K": K,
        "H": H,
        "stride_y_r": y_RH.strides[0],
        "stride_out_t": out_TH.strides[0],
        "UNROLL": min(8, power_of_2(max(1, K))),
        "BLOCK_H": block,
    }
    costs = cost.combine(T, K, H, y_RH.dtype.itemsize)
    builder.launch(_combine_kernel, (T, cdiv(H, block)), arguments, cost=costs, num_warps=max(1, block // 256))
