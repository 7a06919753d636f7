"""Launch pass (3), the backward of fc2 with the activation: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import activation
from ..launching import cost, launches
from ..launching.launcher import launch
from ..operands import descriptors
from ..operands.alignment import vectors_fit
from ..operands.expert_tensors import ExpertTensors
from ..routing.plan import Schedule
from ..tiles.configs import BY_DESCRIPTORS, cdiv, choose, consumers, dot_precision, num_programs, task_rows
from .triton_kernel import _bias_dprobs, _grouped_dgrad_act_kernel


def grouped_dgrad_act_(
    dh_RG: Tensor,
    a_RF: Tensor,
    dy_RH: Tensor,
    h_RG: Tensor,
    w_EHF: ExpertTensors,
    schedule: Schedule,
    act: activation.Options,
    *,
    bias_EH: ExpertTensors | None = None,
    probs_R: Tensor | None = None,
    rows_R: Tensor | None = None,
) -> Tensor | None:
    """Writes all of `dh` and `a`, zeros at padding rows; returns fp32 parts of `dprobs`, `[parts, R]`, zero at padding
    rows, which `gemm/dprobs.py` adds up, or None.

    Activations have unit column stride, and `dh` the strides of `h`. `bias` is read only with `probs`.
    `rows` (`[R]` int32 or int64, read for owned rows only) makes `dy` `[T, H]`: row r takes `dy[rows[r]]`.
    """
    (num_rows, F), H, num_experts = a_RF.shape, dy_RH.shape[1], schedule.num_experts
    w_EFH = w_EHF._replace(strides=w_EHF.strides[::-1])
    w_view = descriptors.matrices(w_EFH, num_experts, (F, H)) if num_rows else None
    gathered, halves = rows_R is not None, activation.halves(act)
    fits = w_view is not None and all(map(descriptors.fits_tensor, (h_RG, dh_RG, a_RF)))
    fits = fits and descriptors.fits_halves(dh_RG, halves)
    dy_described = descriptors.fits_tensor(dy_RH)
    would_spill = act.CURVE == "gelu" and act.LIMIT is not None and halves == 2  # with a task for each warp
    fits = fits and (vectors_fit((dy_RH,), [], (H,)) if gathered else dy_described)
    path, tile = choose(
        "dgrad_act",
        dy_RH.dtype,
        dy_RH.device,
        fits,
        lambda: vectors_fit((dy_RH, h_RG, dh_RG, a_RF), [w_EFH], (H, F)),
        schedule.rows_per_expert,
        gathered,
        dy_described and not would_spill,
    )
    num_f, partial = cdiv(F, tile.BLOCK_N), None
    if probs_R is not None:
        parts = num_f if bias_EH is None else num_f + 1
        partial = torch.empty(parts, num_rows, dtype=torch.float32, device=dy_RH.device)
    if not num_rows:
        return partial
    k_contiguous = w_EFH.strides[1] == 1
    dy_desc = w_desc = h_desc = dh_desc = a_desc = None
    if path in BY_DESCRIPTORS and w_view is not None:
        block_m, width = task_rows(path, tile, dy_RH.device), tile.BLOCK_N // tile.SUBTILES
        if not gathered:
            dy_desc = descriptors.ragged_rows(dy_RH, block_m, tile.BLOCK_K)
        elif path == "specialised":
            dy_desc = descriptors.gathered_rows(dy_RH, tile.BLOCK_K)
        w_desc = descriptors.of_matrices(w_view, tile.BLOCK_N, tile.BLOCK_K, k_contiguous)
        h_desc, dh_desc = (
            descriptors.ragged_rows(t, block_m, width * act.CHANNEL_STEP, halves=halves, apart=path == "specialised")
            for t in (h_RG, dh_RG)
        )
        a_desc = descriptors.ragged_rows(a_RF, block_m, width)
    tokens = dy_RH.shape[0] if gathered else None
    gated, bias, probs = act.GATED, bias_EH is not None and probs_R is not None, launches.size_of(probs_R)
    launches.report(
        path,
        lambda: cost.dgrad_act(
            schedule.rows(), H, F, h_RG.element_size(), gated=gated, bias=bias, probs=probs, tokens=tokens
        ),
    )
    grid = (num_programs(tile, dy_RH.device, schedule.max_tiles(tile.BLOCK_M) * num_f),)
    bias_ptrs = (bias_EH.base, bias_EH.table) if bias_EH else (None, None)
    stride_bias_e = bias_EH.stride_e if bias_EH else 0
    reversed_, tiles = w_EFH.stride_e < 0, schedule.tiles(tile.BLOCK_M)
    if path == "specialised":
        from .gluon_kernel import grouped_dgrad_act_specialised_kernel

        if bias and partial is not None:
            launch(
                _bias_dprobs,
                (schedule.max_tiles(tile.BLOCK_M),),
                *(partial[num_f], dy_RH, rows_R, *bias_ptrs, tiles, H, dy_RH.stride(0), stride_bias_e),
                *(tile.BLOCK_M, tile.BLOCK_K),
                num_warps=8,
            )
        launch(
            grouped_dgrad_act_specialised_kernel,
            grid,
            *(dy_desc, rows_R, w_desc, probs_R, h_desc, dh_RG, dh_desc, a_RF, a_desc, partial, tiles),
            *(num_experts, num_rows, 0 if partial is None else len(partial), H, F, h_RG.stride(0), a_RF.stride(0)),
            *(act, k_contiguous, reversed_, consumers(dy_RH.device), tile),
            num_warps=tile.num_warps,
        )
        return partial
    launch(
        _grouped_dgrad_act_kernel,
        grid,
        dy_RH,
        dy_desc,
        rows_R,
        w_EFH.base,
        w_desc,
        w_EFH.table,
        *bias_ptrs,
        probs_R,
        h_RG,
        dh_RG,
        dh_desc,
        a_RF,
        a_desc,
        partial,
        tiles,
        num_experts,
        num_rows,
        H,
        F,
        dy_RH.stride(0),
        w_EFH.stride_e,
        *w_EFH.strides,
        stride_bias_e,
        h_RG.stride(0),
        a_RF.stride(0),
        act,
        k_contiguous,
        reversed_,
        w_EFH.aligned,
        tile,
        dot_precision(dy_RH.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return partial
