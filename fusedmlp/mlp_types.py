"""What the two halves of the grouped MLP return, for both implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        num_rows = x_RH.shape[0]
        return MLPGrads(
            torch.empty_like(x_RH) if need_dx else x_RH.new_empty(0),
            x_RH.new_empty(0 if probs_R is None else num_rows, dtype=torch.float32),
            torch.empty_like(h_RG) if keep else h_RG.new_empty(0),
            h_RG.new_empty(num_rows, ffn_size) if keep else h_RG.new_empty(0),
        )
