"""Pass (1): `h = x @ fc1^T + bias1` and `a = act(h) * probs`, for the rows of every expert.

One program computes both channels of an output column: `h` has `G = 2F` columns, gate `f` and linear `F + f` (halves of
a row), or interleaved, gate `2f` and linear `2f + 1`. Both are columns of one accumulator, twice as wide as `a`'s tile:
with two of them, zeroed where `flatten` joins the loops, ptxas waits after every wgmma. The activation is taken of `h`
as stored, so that backward, which recomputes it from `h`, sees the same values.

With `rows`, row r of the result is computed from row `rows[r]` of `x`: tokens need not be permuted before. x then
comes by pointers, through cp.async, also where all else goes by TMA, which follows an index on Blackwell alone (there
see `fc1_act/gluon_kernel.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device import activation
from ..device.tile_order import load_tile, tile_at, zero_padding
from ..device.tiles import (
    column_subtiles,
    dot,
    expert_base,
    load_bias,
    load_rows,
    load_weight,
    paired,
    round_to,
    store_halves,
    store_rows,
)
from ..launching import cost, launches
from ..launching.launcher import launch
from ..operands import descriptors
from ..operands.alignment import vectors_fit
from ..operands.expert_tensors import ExpertTensors
from ..routing.plan import Schedule
from ..tiles.configs import BY_DESCRIPTORS, cdiv, choose, consumers, dot_precision, num_programs, task_rows


@triton.jit
def _grouped_fc1_act_kernel(
    x_ptr,
    x_desc,
    rows_ptr,
    w_ptr,
    w_desc,
    w_table_ptr,
    bias_ptr,
    bias_table_ptr,
    probs_ptr,
    h_ptr,
    h_desc,
    a_ptr,
    a_desc,
    tiles_ptr,
    num_experts,
    H,
    F,
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
    K_CONTIGUOUS: tl.constexpr,
    REVERSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SUBTILES: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TWO: tl.constexpr = GATED and CHANNEL_STEP == 1
    HALVES: tl.constexpr = 2 if TWO else 1
    BLOCK_G: tl.constexpr = BLOCK_F * CHANNEL_STEP
    WIDTH: tl.constexpr = BLOCK_F // SUBTILES
    tl.assume(H > 0)
    num_m, num_f = tl.load(tiles_ptr), tl.cdiv(F, BLOCK_F)
    end_g = F * CHANNEL_STEP  # of the gates; a tile of weights may run past it, into columns that are not stored
    row_M1 = tl.arange(0, BLOCK_M)[:, None]
    for place in tl.range(tl.program_id(0), num_m * num_f, tl.num_programs(0), flatten=FLATTEN):
        m_tile, f_tile = tile_at(place, num_m, num_f, GROUP_M)
        expert, first, num_rows = load_tile(tiles_ptr, m_tile)
        f, mask_M1 = f_tile * BLOCK_F, row_M1 < num_rows
        x_row_M1 = first + row_M1
        if rows_ptr is not None:
            x_row_M1 = tl.load(rows_ptr + x_row_M1, mask=mask_M1, other=0)
        x_M1 = x_ptr + x_row_M1.to(tl.int64) * stride_x_r
        w = expert_base(w_ptr, w_table_ptr, stride_w_e, expert, ALIGNED)
        w_e = num_experts - 1 - expert if REVERSED else expert

        acc = tl.zeros((BLOCK_M, HALVES * BLOCK_G), dtype=tl.float32)
        for k in range(0, H, BLOCK_H):
            x_MH = load_rows(x_desc, x_M1, first, num_rows, mask_M1, k, H, BLOCK_H)
            # fmt: off
            w_HG = load_weight(
                w_desc, w, w_e, f * CHANNEL_STEP, k, end_g, H, stride_w_g, stride_w_h,
                BLOCK_G, BLOCK_H, K_CONTIGUOUS, HALVES,
            )
            # fmt: on
            acc = dot(x_MH, w_HG, acc, PRECISION)

        h_M1 = h_ptr + (first + row_M1).to(tl.int64) * stride_h_r
        a_M1 = a_ptr + (first + row_M1).to(tl.int64) * stride_a_r
        if probs_ptr is not None:
            probs_M1 = tl.load(probs_ptr + first + row_M1, mask=mask_M1, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert)
        parts = column_subtiles(acc, HALVES * SUBTILES)
        for s in tl.static_range(SUBTILES):
            column = f + s * WIDTH
            h_MG = parts[s]
            if bias_ptr is not None:
                h_MG += load_bias(bias, column * CHANNEL_STEP, end_g, WIDTH * CHANNEL_STEP)
            h_MG = paired(round_to(h_MG, h_ptr.dtype.element_ty))
            if TWO:
                l_MF = parts[SUBTILES + s]
                if bias_ptr is not None:
                    l_MF += load_bias(bias + F, column, F, WIDTH)
                l_MF = paired(round_to(l_MF, h_ptr.dtype.element_ty))
                store_halves(h_desc, h_M1, first, num_rows, mask_M1, column, F, h_MG, l_MF)
                a, _, _ = activation.gated(h_MG.to(tl.float32), l_MF.to(tl.float32), CURVE, ALPHA, LIMIT, OFFSET)
            else:
                store_rows(h_desc, h_M1, first, num_rows, mask_M1, column * CHANNEL_STEP, end_g, h_MG)
                if GATED:
                    g_MF, l_MF = tl.split(tl.reshape(h_MG.to(tl.float32), (BLOCK_M, WIDTH, 2)))
                    a, _, _ = activation.gated(g_MF, l_MF, CURVE, ALPHA, LIMIT, OFFSET)
                else:
                    a, _ = activation.curve(h_MG.to(tl.float32), CURVE, ALPHA)
            if probs_ptr is not None:
                a *= probs_M1
            a = round_to(a, a_ptr.dtype.element_ty)
            store_rows(a_desc, a_M1, first, num_rows, mask_M1, column, F, a)

    # act(0) = 0 for every activation.
    zero_padding(h_ptr, tiles_ptr, 2 * F if GATED else F, stride_h_r, 1, BLOCK_M, WIDTH)
    zero_padding(a_ptr, tiles_ptr, F, stride_a_r, 1, BLOCK_M, WIDTH)


def grouped_fc1_act_(
    h_RG: Tensor,
    a_RF: Tensor,
    x_RH: Tensor,
    w_EGH: ExpertTensors,
    schedule: Schedule,
    act: activation.Options,
    *,
    bias_EG: ExpertTensors | None = None,
    probs_R: Tensor | None = None,
    rows_R: Tensor | None = None,
) -> None:
    """Writes all of `h` and `a`, zeros at padding rows. Activations have unit column stride.

    `rows` (`[R]` int32 or int64, read for owned rows only) makes `x` `[T, H]`: row r takes `x[rows[r]]`.
    """
    G, F, H, num_experts = h_RG.shape[1], a_RF.shape[1], x_RH.shape[1], schedule.num_experts
    if a_RF.numel() == 0:
        return
    w_view = descriptors.matrices(w_EGH, num_experts, (G, H))
    gathered, k_contiguous, step = rows_R is not None, w_EGH.strides[1] == 1, act.CHANNEL_STEP
    halves = G // (F * step)
    # Descriptors bring halves of [H, 2F] apart, as [2, H, F], which is no operand but by way of registers.
    w_by_pointers = halves == 2 and not k_contiguous
    fits = w_view is not None and all(map(descriptors.fits_tensor, (h_RG, a_RF)))
    fits = fits and descriptors.fits_halves(h_RG, halves) and (not w_by_pointers or vectors_fit((), [w_EGH], (F,)))
    x_described = descriptors.fits_tensor(x_RH)
    fits = fits and (vectors_fit((x_RH,), [], (H,)) if gathered else x_described)
    path, tile = choose(
        "fc1_act",
        x_RH.dtype,
        x_RH.device,
        fits,
        lambda: vectors_fit((h_RG, a_RF, x_RH), [w_EGH], (H, F)),
        schedule.rows_per_expert,
        gathered,
        x_described and not w_by_pointers,
    )
    x_desc = w_desc = h_desc = a_desc = None
    if path in BY_DESCRIPTORS and w_view is not None:
        block_m, width = task_rows(path, tile, x_RH.device), tile.BLOCK_N // tile.SUBTILES
        if not gathered:
            x_desc = descriptors.ragged_rows(x_RH, block_m, tile.BLOCK_K)
        elif path == "specialised":
            x_desc = descriptors.gathered_rows(x_RH, tile.BLOCK_K)
        if not w_by_pointers:
            w_desc = descriptors.of_matrices(w_view, tile.BLOCK_N * step, tile.BLOCK_K, k_contiguous, halves)
        h_desc = descriptors.ragged_rows(h_RG, block_m, width * step, halves=halves, apart=path == "specialised")
        a_desc = descriptors.ragged_rows(a_RF, block_m, width)
    tokens = x_RH.shape[0] if gathered else None
    gated, bias, probs = act.GATED, bias_EG is not None, launches.size_of(probs_R)
    launches.report(
        path,
        lambda: cost.fc1_act(
            schedule.rows(), H, F, h_RG.element_size(), gated=gated, bias=bias, probs=probs, tokens=tokens
        ),
    )
    grid = (num_programs(tile, x_RH.device, schedule.max_tiles(tile.BLOCK_M) * cdiv(F, tile.BLOCK_N)),)
    bias_ptrs = (bias_EG.base, bias_EG.table) if bias_EG else (None, None)
    strides = bias_EG.stride_e if bias_EG else 0, h_RG.stride(0), a_RF.stride(0)
    blocks = tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K, tile.SUBTILES, tile.GROUP_M
    reversed_ = w_EGH.stride_e < 0
    if path == "specialised":
        from .gluon_kernel import grouped_fc1_act_specialised_kernel

        launch(
            grouped_fc1_act_specialised_kernel,
            grid,
            *(x_desc, rows_R, w_desc, *bias_ptrs, probs_R, h_RG, h_desc, a_RF, a_desc, schedule.tiles(tile.BLOCK_M)),
            *(num_experts, H, F, *strides),
            *(*act, k_contiguous, reversed_, consumers(x_RH.device), *blocks, tile.num_stages),
            num_warps=tile.num_warps,
        )
        return
    launch(
        _grouped_fc1_act_kernel,
        grid,
        x_RH,
        x_desc,
        rows_R,
        w_EGH.base,
        w_desc,
        w_EGH.table,
        *bias_ptrs,
        probs_R,
        h_RG,
        h_desc,
        a_RF,
        a_desc,
        schedule.tiles(tile.BLOCK_M),
        num_experts,
        H,
        F,
        x_RH.stride(0),
        w_EGH.stride_e,
        *w_EGH.strides,
        *strides,
        *act,
        k_contiguous,
        reversed_,
        w_EGH.aligned,
        *blocks,
        tile.PER_SM > 0,
        dot_precision(x_RH.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
