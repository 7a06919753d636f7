"""Launch pass (1), fc1 with the activation: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

from torch import Tensor

from ..device import activation
from ..launching import cost, launches
from ..launching.launcher import launch
from ..operands import descriptors
from ..operands.alignment import vectors_fit
from ..operands.expert_tensors import ExpertTensors
from ..routing.plan import Schedule
from ..tiles.configs import BY_DESCRIPTORS, cdiv, choose, consumers, dot_precision, num_programs, task_rows
from .triton_kernel import _grouped_fc1_act_kernel


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
    reversed_ = w_EGH.stride_e < 0
    if path == "specialised":
        from .gluon_kernel import grouped_fc1_act_specialised_kernel

        launch(
            grouped_fc1_act_specialised_kernel,
            grid,
            *(x_desc, rows_R, w_desc, *bias_ptrs, probs_R, h_RG, h_desc, a_RF, a_desc, schedule.tiles(tile.BLOCK_M)),
            *(num_experts, H, F, *strides),
            *(act, k_contiguous, reversed_, consumers(x_RH.device), tile),
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
        act,
        k_contiguous,
        reversed_,
        w_EGH.aligned,
        tile,
        dot_precision(x_RH.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
