"""Results of operators, for both implementations."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowOrder(NamedTuple):
    """Order of routed rows: by expert, stable in flat position `t * K + k`; rows of no expert come last."""

    plan: Tensor  # int32; begins with the first row of every expert, then the end of the last: [E + 1]
    row_ids: Tensor  # [R] int32: the token of every row
    places: Tensor  # [R] int32: the row of every flat position
    probs: Tensor  # [R]: of every row


class WeightCopies(NamedTuple):
    """8-bit copies of weights `[E, N, K]`, laid out as in kernels/operands/quantized.py. Operators take one of them, as
    `[elements, scales]`, in place of the weights: for products over in features in forward, over out features in
    backward.
    """

    by_in: Tensor  # [E, N, K] float8_e4m3fn
    by_in_scales: Tensor
    by_out: Tensor  # [E, K, N] float8_e4m3fn
    by_out_scales: Tensor


class MLPOutput(NamedTuple):
    """Forward: the output `[R, H]` and the pre-activation `[R, F1]` that backward needs."""

    y: Tensor
    h: Tensor


class MLPGrads(NamedTuple):
    """Backward: a gradient that was not asked for is None; from an operator, which cannot return that, it is empty."""

    dx: Tensor | None  # [R, H], dtype of x
    dprobs: Tensor | None  # [R], dtype of probs; by row, or with `places` by flat position
    dh: Tensor | None  # [R, F1]: kept for a delayed gradient of fc1
    act_probs: Tensor | None  # [R, F]: kept for a delayed gradient of fc2
