"""Launch pass (3), the backward of fc2 with the activation: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..device import activation
from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands import adapter as adapters
from ..operands import descriptors, expert_tensors
from ..operands.adapter import Adapter
from ..operands.alignment import vectors_fit
from ..operands.arrays import Array, itemsize
from ..operands.expert_tensors import ExpertTensors
from ..routing.plan import Schedule
from ..tiles.rounding import cdiv
from ..tiles.select import Chosen, Target, choose
from ..tiles.table import BY_DESCRIPTORS, small
from ..warp_specialized import refusal
from .triton_kernel import _bias_dprobs, _grouped_dgrad_act_kernel


def plan_bias_dprobs(
    builder: Builder,
    partial_R: Array,
    dy_RH: Array,
    bias_EH: ExpertTensors,
    schedule: Schedule,
    row_ids_R: Array | None,
    blocks: tuple[int, int],
) -> None:
    """Plan what a bias of fc2 adds to `dprobs` in a launch of its own: partial sums `[R]`, written at owned rows.

    `blocks`: rows and columns of `dy` that a program reads at once; others as for `grouped_dgrad_act_`.
    """
    block_m, block_h = blocks
    arguments = _bias_arguments(builder, dy_RH, bias_EH, schedule, row_ids_R, block_m)
    arguments |= {"partial_ptr": partial_R, "BLOCK_M": block_m, "BLOCK_H": block_h}
    builder.launch(_bias_dprobs, (schedule.max_tiles(block_m),), arguments, num_warps=8)


def _bias_arguments(
    builder: Builder,
    dy_RH: Array,
    bias_EH: ExpertTensors | None,
    schedule: Schedule,
    row_ids_R: Array | None,
    block_m: int,
) -> dict[str, Any]:
    return {
        "dy_ptr": dy_RH,
        "row_ids_ptr": row_ids_R,
        **expert_tensors.arguments("bias", bias_EH),
        "tiles_ptr": schedule.tiles(builder, block_m),
        "H": dy_RH.shape[1],
        "stride_dy_r": dy_RH.strides[0],
    }


def _without_spills(chosen: Chosen, act: activation.Options, target: Target) -> Chosen:
    """The chosen tile, in twice as many subtiles where a clamped exact gelu would spill: 8 or 16 bytes with halves, in
    the warp-specialized kernel of Hopper.
    """
    spills = act.CURVE == "gelu" and act.LIMIT is not None and activation.halves(act) == 2
    if not spills or chosen.path != "warp_specialized" or target.consumers == 1:
        return chosen
    return chosen._replace(tile=chosen.tile._replace(SUBTILES=2 * chosen.tile.SUBTILES))


@Launcher
def grouped_dgrad_act_(
    builder: Builder,
    dh_RG: Array,
    a_RF: Array,
    dy_RH: Array,
    h_RG: Array,
    w_EHF: ExpertTensors,
    schedule: Schedule,
    act: activation.Options,
    *,
    bias_EH: ExpertTensors | None = None,
    probs_R: Array | None = None,
    row_ids_R: Array | None = None,
    adapter: Adapter | None = None,
) -> Array | None:
    """Writes all of `dh` and `a`, zeros at padding rows; returns None or fp32 partial sums of `dprobs`,
    `[num_partials, R]`, zero at padding rows, which `gemm/dprobs.py` adds up.

    Activations have unit column stride, and `dh` the strides of `h`. `bias` is read only with `probs`.
    `row_ids` (`[R]` int32 or int64, read for owned rows only) makes `dy` `[T, H]`: row r takes `dy[row_ids[r]]`.
    `adapter`: adds `t @ b^T` to `dy @ fc2`.
    """
    target, dtype, gathered = builder.target, dy_RH.dtype, row_ids_R is not None
    (num_rows, F), H = a_RF.shape, dy_RH.shape[1]
    w_EFH, k_contiguous = w_EHF.T, w_EHF.strides[0] == 1
    w_view, halves = descriptors.matrices(w_EFH, (F, H)), activation.halves(act)
    fits = w_view is not None and all(map(descriptors.fits, (h_RG, dh_RG, a_RF)))
    fits = fits and descriptors.fits_halves(dh_RG, halves)
    fits = fits and adapters.fits(adapter, k_contiguous)
    dy_described = descriptors.fits(dy_RH)
    dy_vectors = vectors_fit((dy_RH,), [], (H,))
    fits = fits and (dy_vectors if gathered else dy_described)
    vectors = vectors_fit((dy_RH, h_RG, dh_RG, a_RF), [w_EFH], (H, F))
    described = fits and (dy_described or (gathered and target.consumers == 2))
    refused, regime = refusal(target, described=described, gathered=gathered, vectors=dy_vectors), small(H)
    chosen = choose("dgrad_act", dtype, target, fits, vectors, schedule.rows_per_expert, gathered, refused, regime)
    chosen = _without_spills(chosen, act, target)
    path, tile = chosen.path, chosen.tile
    num_f = cdiv(F, tile.BLOCK_N)
    num_partials = num_f if bias_EH is None else num_f + 1
    partial_PR = None if probs_R is None else builder.empty((num_partials, num_rows), torch.float32)
    if not num_rows:
        return partial_PR
    dy_desc = w_desc = dh_desc = a_desc = None
    block_m, width = target.consumer_rows(path, tile), tile.BLOCK_N // tile.SUBTILES
    channels = {"block_columns": width * act.CHANNEL_STEP, "halves": halves, "apart": path == "warp_specialized"}
    if path in BY_DESCRIPTORS and w_view is not None:
        dy_desc = descriptors.operand_rows(dy_RH, block_m, tile.BLOCK_K, gathered, target.gathers_by_tma(path))
        w_desc = descriptors.of_matrices(w_view, tile.BLOCK_N, tile.BLOCK_K, k_contiguous)
        dh_desc = descriptors.ragged_rows(dh_RG, block_m, **channels)
        a_desc = descriptors.ragged_rows(a_RF, block_m, width)
    with_bias = bias_EH is not None and probs_R is not None
    arguments: dict[str, Any] = {
        "dy_desc": dy_desc,
        "row_ids_ptr": row_ids_R,
        "w_desc": w_desc,
        "probs_ptr": probs_R,
        "dh_ptr": dh_RG,
        "dh_desc": dh_desc,
        "a_ptr": a_RF,
        "a_desc": a_desc,
        "partial_ptr": partial_PR,
        "tiles_ptr": schedule.tiles(builder, tile.BLOCK_M),
        "num_experts": schedule.num_experts,
        "num_rows": num_rows,
        "H": H,
        "F": F,
        "stride_h_r": h_RG.strides[0],
        "stride_a_r": a_RF.strides[0],
        "ACT": act,
        **adapters.arguments(adapter, path, tile, block_m, tile.BLOCK_N),
        "K_CONTIGUOUS": k_contiguous,
        "REVERSED": w_EFH.stride_e < 0,
    }
    grid = (target.num_programs(tile, schedule.max_tiles(tile.BLOCK_M) * num_f),)
    sizes: dict[str, Any] = {"H": H, "F": F, "itemsize": dtype.itemsize, "probs": itemsize(probs_R)}
    tokens = dy_RH.shape[0] if gathered else None
    rank = adapter.rank if adapter else 0
    costs = partial(cost.dgrad_act, **sizes, gated=act.GATED, bias=with_bias, tokens=tokens, rank=rank)
    if path == "warp_specialized":
        from .gluon_kernel import grouped_dgrad_act_warp_specialized_kernel

        if bias_EH is not None and partial_PR is not None:
            blocks = tile.BLOCK_M, tile.BLOCK_K
            plan_bias_dprobs(builder, partial_PR[num_f], dy_RH, bias_EH, schedule, row_ids_R, blocks)
        h_desc = descriptors.ragged_rows(h_RG, block_m, **channels)
        arguments |= {"h_desc": h_desc, "num_partials": num_partials if partial_PR else 0}
        copied = dy_RH if dy_desc is None else None
        arguments = adapters.warp_specialized(arguments, copied is not None)
        arguments |= {"dy_ptr": copied, "stride_dy_r": copied and copied.strides[0]}
        builder.launch(grouped_dgrad_act_warp_specialized_kernel, grid, arguments, chosen, costs)
        return partial_PR
    arguments |= {
        **_bias_arguments(builder, dy_RH, bias_EH, schedule, row_ids_R, tile.BLOCK_M),
        **expert_tensors.weight_arguments(w_EFH, "f", "h"),
        "h_ptr": h_RG,
        "PRECISION": target.precision(dtype),
    }
    builder.launch(_grouped_dgrad_act_kernel, grid, arguments, chosen, costs)
    return partial_PR
