"""Pass (3): `da = dy @ fc2`, with the backward of `a = act(h) * p` in its epilogue (p: routing probability).

With `g`, `l` the gate and linear parts of `h`, recomputed from it:
    dh_g = p * da * d act / dg,    dh_l = p * da * d act / dl,    a = p * act
    dprobs[r] = sum_f da[r, f] * act[r, f] + dy[r] . bias2
(the last term because `y = p * (fc2 @ act + bias2)`). The sum over f is one fp32 partial per column tile, and the
launcher adds those in a fixed order: no atomics, the same bits every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import activation
from .common import dot, expert_base, load_tile, round_to
from .configs import dot_precision, select
from .expert_tensors import ExpertTensors
from .schedule import tile_schedule


@triton.jit
def _grouped_dgrad_act_kernel(
    dy_ptr,
    w_ptr,
    w_table_ptr,
    bias_ptr,
    bias_table_ptr,
    probs_ptr,
    h_ptr,
    dh_ptr,
    a_ptr,
    partial_ptr,
    tiles_ptr,
    num_tiles,
    num_experts,
    num_rows,
    H,
    F,
    linear_start,
    stride_dy_r,
    stride_w_e,
    stride_w_h,
    stride_w_f,
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
    f_tile = tl.program_id(0) % num_f
    expert, first, end = load_tile(tiles_ptr, num_tiles, tl.program_id(0) // num_f)
    if expert < 0:
        return
    owned = expert < num_experts  # at padding rows da = 0 and h = 0, so everything stored is zero
    expert = tl.minimum(expert, num_experts - 1)
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    f = (f_tile * BLOCK_F + tl.arange(0, BLOCK_F)).to(tl.int64)
    row_mask, f_mask = rows < end, f < F
    mask = row_mask[:, None] & f_mask[None, :]
    gate, linear = f * CHANNEL_STEP, linear_start + f * CHANNEL_STEP

    w = expert_base(w_ptr, w_table_ptr, stride_w_e, expert)
    da = tl.zeros((BLOCK_M, BLOCK_F), dtype=tl.float32)
    dprobs = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, tl.where(owned, H, 0), BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
        dy = tl.load(
            dy_ptr + rows[:, None] * stride_dy_r + h[None, :], mask=row_mask[:, None] & (h < H)[None, :], other=0.0
        )
        w_HF = tl.load(
            w + h[:, None] * stride_w_h + f[None, :] * stride_w_f, mask=(h < H)[:, None] & f_mask[None, :], other=0.0
        )
        da = dot(dy, w_HF, da, PRECISION)
        if bias_ptr is not None:
            bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
            bias_H = tl.load(bias + h, mask=(h < H) & (f_tile == 0), other=0.0).to(tl.float32)
            dprobs += tl.sum(dy.to(tl.float32) * bias_H[None, :], axis=1)

    h_row = h_ptr + rows[:, None] * stride_h_r
    dh_row = dh_ptr + rows[:, None] * stride_h_r
    g = tl.load(h_row + gate[None, :], mask=mask & owned, other=0.0).to(tl.float32)
    if GATED:
        l = tl.load(h_row + linear[None, :], mask=mask & owned, other=0.0).to(tl.float32)
        act, by_gate, by_linear = activation.gated(g, l, CURVE, ALPHA, LIMIT, OFFSET)
    else:
        act, by_gate = activation.curve(g, CURVE, ALPHA)
    if probs_ptr is not None:
        dprobs += tl.sum(tl.where(mask, da * act, 0.0), axis=1)
        tl.store(partial_ptr + f_tile.to(tl.int64) * num_rows + rows, dprobs, mask=row_mask)
        probs = tl.load(probs_ptr + rows, mask=row_mask & owned, other=0.0).to(tl.float32)[:, None]
        da *= probs
        act *= probs
    tl.store(dh_row + gate[None, :], round_to(da * by_gate, dh_ptr.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(dh_row + linear[None, :], round_to(da * by_linear, dh_ptr.dtype.element_ty), mask=mask)
    tl.store(a_ptr + rows[:, None] * stride_a_r + f[None, :], round_to(act, a_ptr.dtype.element_ty), mask=mask)


def grouped_dgrad_act_(
    dh_RG: Tensor,
    a_RF: Tensor,
    dy_RH: Tensor,
    h_RG: Tensor,
    w_EHF: ExpertTensors,
    offsets: Tensor,
    act: activation.Options,
    *,
    bias_EH: ExpertTensors | None = None,
    probs_R: Tensor | None = None,
) -> Tensor | None:
    """Writes all of `dh` and `a`, zeros at padding rows; returns `dprobs [R]` in fp32, zero at padding rows, or None.

    Activations have unit column stride, and `dh` the strides of `h`.
    """
    num_rows, F = a_RF.shape
    tile = select("dgrad_act", dy_RH.dtype, dy_RH.device, "pointer", num_rows / (offsets.shape[0] - 1))
    num_f = triton.cdiv(F, tile.BLOCK_N)
    partial = torch.empty(num_f, num_rows, dtype=torch.float32, device=dy_RH.device) if probs_R is not None else None
    if num_rows:
        tiles = tile_schedule(offsets, num_rows, tile.BLOCK_M)
        num_tiles = tiles.shape[1]
        _grouped_dgrad_act_kernel[(num_tiles * num_f,)](
            dy_RH,
            w_EHF.base,
            w_EHF.table,
            bias_EH.base if bias_EH else None,
            bias_EH.table if bias_EH else None,
            probs_R,
            h_RG,
            dh_RG,
            a_RF,
            partial,
            tiles,
            num_tiles,
            offsets.shape[0] - 1,
            num_rows,
            dy_RH.shape[1],
            F,
            act.linear_start(F),
            dy_RH.stride(0),
            w_EHF.stride_e,
            *w_EHF.strides,
            bias_EH.stride_e if bias_EH else 0,
            h_RG.stride(0),
            a_RF.stride(0),
            *act,
            tile.BLOCK_M,
            tile.BLOCK_N,
            tile.BLOCK_K,
            dot_precision(dy_RH.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return None if partial is None else partial.sum(0)
