"""What operators return, for both implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Order of routed rows: by expert, stable in flat position `t * K + k`; rows of no expert come last."""

    offsets: Tensor  # [E + 1] int32: first row of every expert, then the end of the last
    slots: Tensor  # [R] int32: the flat position of every row
    rows: Tensor  # [R] int32, its inverse: the row of every flat position


class MLPOutput(NamedTuple):
    """Forward: the output `[R, H]` and the pre-activation `[R, F1]` that backward needs."""

    y: Tensor
    h: Tensor


class MLPGrads(NamedTuple):
    """Backward: what was not asked for has no elements (operators cannot return None)."""

    dx: Tensor  # [R, H], dtype of x
    dprobs: Tensor  # [R], fp32
    dh: Tensor  # [R, F1]: kept for a delayed gradient of fc1
    act_probs: Tensor  # [R, F]: kept for a delayed gradient of fc2

    @staticmethod
    def empty(x_RH: Tensor, h_RG: Tensor, ffn_size: int, probs_R: Tensor | None, need_dx: bool, keep: bool) -> MLPGrads:
        """Uninitialised results of the right shapes."""
        num_rows = h_RG.shape[0]  # not that of x, where rows are gathered from tokens
        return MLPGrads(
            x_RH.new_empty(num_rows, x_RH.shape[1]) if need_dx else x_RH.new_empty(0),
            x_RH.new_empty(0 if probs_R is None else num_rows, dtype=torch.float32),
            torch.empty_like(h_RG) if keep else h_RG.new_empty(0),
            h_RG.new_empty(num_rows, ffn_size) if keep else h_RG.new_empty(0),
        )
