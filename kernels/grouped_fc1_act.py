"""Pass (1): `h = x @ fc1^T + bias1` and `a = act(h) * probs`, for the rows of every expert.

Gate and linear channel of one output column are computed by one program with two accumulators: `h` has `G = 2F`
columns, gate `f` at `f * CHANNEL_STEP`, linear `f` at `linear_start + f * CHANNEL_STEP` (adjacent or interleaved).
The activation is taken of `h` as stored, so that backward, which recomputes it from `h`, sees the same values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import activation
from .common import dot, expert_base, load_tile, round_to
from .configs import dot_precision, select
from .expert_tensors import ExpertTensors
from .schedule import tile_schedule


@triton.jit
def _grouped_fc1_act_kernel(
    x_ptr,
    w_ptr,
    w_table_ptr,
    bias_ptr,
    bias_table_ptr,
    probs_ptr,
    h_ptr,
    a_ptr,
    tiles_ptr,
    num_tiles,
    num_experts,
    H,
    F,
    linear_start,
    stride_x_r,
    stride_w_e,
    stride_w_g,
    stride_w_h,
    stride_bias_e,
    stride_h_r,
    stride_a_r,
    GATED: tl.constexpr,
    CHANNEL_STEP: tl.constexpr,
    CURVE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_f = tl.cdiv(F, BLOCK_F)
    expert, first, end = load_tile(tiles_ptr, num_tiles, tl.program_id(0) // num_f)
    if expert < 0:
        return
    owned = expert < num_experts  # padding rows: h = 0, and act(0) = 0
    expert = tl.minimum(expert, num_experts - 1)
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    f = ((tl.program_id(0) % num_f) * BLOCK_F + tl.arange(0, BLOCK_F)).to(tl.int64)
    row_mask, f_mask = rows < end, f < F
    mask = row_mask[:, None] & f_mask[None, :]
    gate, linear = f * CHANNEL_STEP, linear_start + f * CHANNEL_STEP

    w = expert_base(w_ptr, w_table_ptr, stride_w_e, expert)
    acc_gate = tl.zeros((BLOCK_M, BLOCK_F), dtype=tl.float32)
    acc_linear = tl.zeros((BLOCK_M, BLOCK_F), dtype=tl.float32)
    for start in range(0, tl.where(owned, H, 0), BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
        x = tl.load(
            x_ptr + rows[:, None] * stride_x_r + h[None, :], mask=row_mask[:, None] & (h < H)[None, :], other=0.0
        )
        w_h, w_mask = w + h[:, None] * stride_w_h, (h < H)[:, None] & f_mask[None, :]
        acc_gate = dot(x, tl.load(w_h + gate[None, :] * stride_w_g, mask=w_mask, other=0.0), acc_gate, PRECISION)
        if GATED:
            w_linear = tl.load(w_h + linear[None, :] * stride_w_g, mask=w_mask, other=0.0)
            acc_linear = dot(x, w_linear, acc_linear, PRECISION)

    if bias_ptr is not None:
        bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
        acc_gate += tl.load(bias + gate, mask=f_mask & owned, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_linear += tl.load(bias + linear, mask=f_mask & owned, other=0.0).to(tl.float32)[None, :]
    h_row = h_ptr + rows[:, None] * stride_h_r
    stored_gate = round_to(acc_gate, h_ptr.dtype.element_ty)
    tl.store(h_row + gate[None, :], stored_gate, mask=mask)
    if GATED:
        stored_linear = round_to(acc_linear, h_ptr.dtype.element_ty)
        tl.store(h_row + linear[None, :], stored_linear, mask=mask)
        a, _, _ = activation.gated(
            stored_gate.to(tl.float32), stored_linear.to(tl.float32), CURVE, ALPHA, LIMIT, OFFSET
        )
    else:
        a, _ = activation.curve(stored_gate.to(tl.float32), CURVE, ALPHA)
    if probs_ptr is not None:
        a *= tl.load(probs_ptr + rows, mask=row_mask & owned, other=0.0).to(tl.float32)[:, None]
    tl.store(a_ptr + rows[:, None] * stride_a_r + f[None, :], round_to(a, a_ptr.dtype.element_ty), mask=mask)


def grouped_fc1_act_(
    h_RG: Tensor,
    a_RF: Tensor,
    x_RH: Tensor,
    w_EGH: ExpertTensors,
    offsets: Tensor,
    act: activation.Options,
    *,
    bias_EG: ExpertTensors | None = None,
    probs_R: Tensor | None = None,
) -> None:
    """Writes all of `h` and `a`, zeros at padding rows. Activations have unit column stride."""
    num_rows, F = a_RF.shape
    if a_RF.numel() == 0:
        return
    tile = select("fc1_act", x_RH.dtype, x_RH.device, "pointer", num_rows / (offsets.shape[0] - 1))
    tiles = tile_schedule(offsets, num_rows, tile.BLOCK_M)
    num_tiles = tiles.shape[1]
    _grouped_fc1_act_kernel[(num_tiles * triton.cdiv(F, tile.BLOCK_N),)](
        x_RH,
        w_EGH.base,
        w_EGH.table,
        bias_EG.base if bias_EG else None,
        bias_EG.table if bias_EG else None,
        probs_R,
        h_RG,
        a_RF,
        tiles,
        num_tiles,
        offsets.shape[0] - 1,
        x_RH.shape[1],
        F,
        act.linear_start(F),
        x_RH.stride(0),
        w_EGH.stride_e,
        *w_EGH.strides,
        bias_EG.stride_e if bias_EG else 0,
        h_RG.stride(0),
        a_RF.stride(0),
        *act,
        tile.BLOCK_M,
        tile.BLOCK_N,
        tile.BLOCK_K,
        dot_precision(x_RH.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
