"""Copies of every token's row, in the order of experts: `out[places[t * K + k]] = x[t]`.

The opposite of `combine.py`, with the same traffic: each token is read once, and each row written once, as a whole. A
program for each row would read every token K times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands.arrays import Array
from ..tiles.rounding import cdiv, power_of_2
from .plan import Schedule


@triton.jit
def _spread_kernel(
    x_ptr,
    rows_ptr,
    offsets_ptr,
    out_ptr,
    E,
    K,
    H,
    stride_x_t,
    stride_out_r,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """`x` `[T, H]`, `rows` `[T * K]` integers, `offsets` starts with `[E + 1]` integers, `out` `[T * K, H]`.

    There is one program for each token and BLOCK_H columns.
    """
    end = tl.load(offsets_ptr + E)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    x = tl.load(x_ptr + token * stride_x_t + columns, mask=mask)
    for first in range(0, K, UNROLL):
        # The numbers of UNROLL rows are loaded at once.
        for k in tl.static_range(UNROLL):
            row = tl.load(rows_ptr + token * K + first + k, mask=first + k < K, other=end).to(tl.int64)
            # A number for each column: Triton 3.9's interpreter makes integers of one condition for all of them.
            used = tl.zeros_like(columns) + row < end
            tl.store(out_ptr + row * stride_out_r + columns, x, mask=mask & used)


@Launcher
def spread_(builder: Builder, out_RH: Array, x_TH: Array, places_R: Array, schedule: Schedule) -> None:
    """Writes the rows of `out` that `places`, `[T * K]` integers, names, but none that is of no expert of the schedule.
    `out` and `x` have unit column stride.
    """
    (T, H), K = x_TH.shape, places_R.shape[0] // max(1, x_TH.shape[0])
    if not T * K * H:
        return
    block = min(1024, power_of_2(H))
    arguments = {
        "x_ptr": x_TH,
        "rows_ptr": places_R,
        "offsets_ptr": schedule.offsets,
        "out_ptr": out_RH,
        "E": schedule.num_experts,
        "K": K,
        "H": H,
        "stride_x_t": x_TH.strides[0],
        "stride_out_r": out_RH.strides[0],
        "UNROLL": min(8, power_of_2(K)),
        "BLOCK_H": block,
    }
    costs = cost.spread(T, K, H, x_TH.dtype.itemsize)
    builder.launch(_spread_kernel, (T, cdiv(H, block)), arguments, cost=costs, num_warps=max(1, block // 256))
