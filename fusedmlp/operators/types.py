"""Arguments of the operators of a whole MLP, and results of operators, for both implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class RowCopies(NamedTuple):
    """8-bit copies of rows `x` `[R, C]`. Operators of an MLP take one of them in place of x, with its scales: forward
    `rows`, backward `tokens`. Only shapes of `rows` are the same for all implementations.
    """

    rows: Tensor  # [R, C] float8_e4m3fn, in blocks along columns
    rows_scales: Tensor
    tokens: Tensor  # float8_e4m3fn, in blocks along rows
    tokens_scales: Tensor


class MLPArguments(NamedTuple):
    """Forward: the arguments of `ops.grouped_mlp`, and so of its schema."""

    x: Tensor  # [R, H], or with `row_ids` [T, H]; or a copy of it
    x_scales: Tensor | None  # of the copy
    fc1: Sequence[Tensor]
    fc2: Sequence[Tensor]
    bias1: Sequence[Tensor] | None
    bias2: Sequence[Tensor] | None
    offsets: Tensor
    row_ids: Tensor | None  # [R]
    places: Tensor | None  # [R], with `row_ids`: y is `[T, H]`
    probs: Tensor | None  # [R]
    activation: str
    recipe: str
    batch_invariant: bool = False
    lora1: Sequence[Tensor] | None = None  # [scaling * A, B] of fc1, in the dtype of h
    lora2: Sequence[Tensor] | None = None
    impl: str = ""  # implementations are called without it

    @property
    def without_impl(self) -> tuple[Any, ...]:
        """Arguments of the implementation that `impl` names."""
        return self[:-1]


class MLPBackwardArguments(NamedTuple):
    """Backward: the arguments of `ops.grouped_mlp_backward_`, and so of its schema."""

    dw1: Sequence[Tensor]  # outputs; empty: not wanted
    dw2: Sequence[Tensor]
    db1: Sequence[Tensor]
    db2: Sequence[Tensor]
    dlora1: Sequence[Tensor]  # gradients of `lora1`, in any dtype: always overwritten
    dlora2: Sequence[Tensor]
    dy: Tensor  # [R, H], or with `row_ids` [T, H]
    x: Tensor  # likewise; or a copy of it
    x_scales: Tensor | None  # of the copy
    h: Tensor  # [R, F1]
    fc1: Sequence[Tensor]
    fc2: Sequence[Tensor]
    bias2: Sequence[Tensor]
    offsets: Tensor
    row_ids: Tensor | None  # [R]
    places: Tensor | None  # [R], with `row_ids`: dx is `[T, H]`
    probs: Tensor | None  # [R]
    activation: str
    accumulate1: bool  # add to `dw1`; otherwise overwrite it
    accumulate2: bool
    need_dx: bool
    keep: bool  # also return what delayed weight gradients need
    recipe: str
    batch_invariant: bool = False
    lora1: Sequence[Tensor] | None = None
    lora2: Sequence[Tensor] | None = None
    t1: Tensor | None = None  # of forward
    t2: Tensor | None = None
    impl: str = ""  # implementations are called without it

    @classmethod
    def of(cls, forward: MLPArguments, **own: Any) -> MLPBackwardArguments:
        """Arguments of the backward of that forward. `own`: those that forward has not, or that differ."""
        return cls(**({name: each for name, each in forward._asdict().items() if name in cls._fields} | own))

    @property
    def without_impl(self) -> tuple[Any, ...]:
        """Arguments of the implementation that `impl` names."""
        return self[:-1]


class MLPOutput(NamedTuple):
    """Forward: the output `[R, H]`, or with `places` `[T, H]`, and what backward needs: the pre-activation `[R, F1]`,
    and of each adapter `scaling * A x`, `[R, r]`. Without an adapter that is None; an operator, which cannot return
    None, returns an empty tensor.
    """

    y: Tensor
    h: Tensor
    t1: Tensor | None = None
    t2: Tensor | None = None


class MLPGrads(NamedTuple):
    """Backward: a gradient that was not asked for is None; from an operator, which cannot return that, it is empty."""

    dx: Tensor | None  # [R, H], or with `places` [T, H], dtype of x
    dprobs: Tensor | None  # [R], dtype of probs; by row, or with `places` by flat position
    dh: Tensor | None  # [R, F1]: kept for a delayed gradient of fc1
    act_probs: Tensor | None  # [R, F]: kept for a delayed gradient of fc2
