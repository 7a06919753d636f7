"""Launch pass (1), fc1 with the activation: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

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
from ..tiles.select import choose
from ..tiles.table import BY_DESCRIPTORS
from ..warp_specialized import refusal
from .triton_kernel import _grouped_fc1_act_kernel


@Launcher
def grouped_fc1_act_(
    builder: Builder,
    h_RG: Array,
    a_RF: Array,
    x_RH: Array,
    w_EGH: ExpertTensors,
    schedule: Schedule,
    act: activation.Options,
    *,
    bias_EG: ExpertTensors | None = None,
    probs_R: Array | None = None,
    row_ids_R: Array | None = None,
    adapter: Adapter | None = None,
) -> None:
    """Writes all of `h` and `a`, zeros at padding rows. Activations have unit column stride.

    `row_ids` (`[R]` int32 or int64, read for owned rows only) makes `x` `[T, H]`: row r takes `x[row_ids[r]]`.
    `adapter`: adds `t @ b^T` to `h`.
    """
    target, dtype, gathered = builder.target, x_RH.dtype, row_ids_R is not None
    G, (num_rows, F), H = h_RG.shape[1], a_RF.shape, x_RH.shape[1]
    if not num_rows * F:
        return
    w_view = descriptors.matrices(w_EGH, (G, H))
    k_contiguous, step = w_EGH.strides[1] == 1, act.CHANNEL_STEP
    halves = G // (F * step)
    # A descriptor loads halves of [H, 2F] as [2, H, F], which MMAs of plain Triton can use by way of registers only.
    w_by_pointers = halves == 2 and not k_contiguous
    fits = w_view is not None and descriptors.fits(h_RG) and descriptors.fits(a_RF)
    fits = fits and descriptors.fits_halves(h_RG, halves) and (not w_by_pointers or vectors_fit((), [w_EGH], (F,)))
    fits = fits and adapters.fits(adapter, k_contiguous)
    x_described = descriptors.fits(x_RH)
    x_vectors = vectors_fit((x_RH,), [], (H,))
    fits = fits and (x_vectors if gathered else x_described)
    vectors = vectors_fit((h_RG, a_RF, x_RH), [w_EGH], (H, F))
    described = fits and (x_described or (gathered and target.consumers == 2))
    refused = refusal(target, described=described, gathered=gathered, vectors=x_vectors)
    chosen = choose("fc1_act", dtype, target, fits, vectors, schedule.rows_per_expert, gathered, refused)
    path, tile = chosen.path, chosen.tile
    x_desc = w_desc = h_desc = a_desc = None
    if path in BY_DESCRIPTORS and w_view is not None:
        block_m, width = target.consumer_rows(path, tile), tile.BLOCK_N // tile.SUBTILES
        x_desc = descriptors.operand_rows(x_RH, block_m, tile.BLOCK_K, gathered, target.gathers_by_tma(path))
        if path == "warp_specialized" or not w_by_pointers:
            w_desc = descriptors.of_matrices(w_view, tile.BLOCK_N * step, tile.BLOCK_K, k_contiguous, halves)
        h_desc = descriptors.ragged_rows(h_RG, block_m, width * step, halves=halves, apart=path == "warp_specialized")
        a_desc = descriptors.ragged_rows(a_RF, block_m, width)
    arguments = {
        "x_desc": x_desc,
        "row_ids_ptr": row_ids_R,
        "w_desc": w_desc,
        **expert_tensors.arguments("bias", bias_EG),
        "probs_ptr": probs_R,
        "h_ptr": h_RG,
        "h_desc": h_desc,
        "a_ptr": a_RF,
        "a_desc": a_desc,
        "tiles_ptr": schedule.tiles(builder, tile.BLOCK_M),
        "num_experts": schedule.num_experts,
        "H": H,
        "F": F,
        "stride_h_r": h_RG.strides[0],
        "stride_a_r": a_RF.strides[0],
        "ACT": act,
        **adapters.arguments(
            *(adapter, path, tile, target.consumer_rows(path, tile), tile.BLOCK_N * step, halves, w_by_pointers)
        ),
        "K_CONTIGUOUS": k_contiguous,
        "REVERSED": w_EGH.stride_e < 0,
    }
    grid = (target.num_programs(tile, schedule.max_tiles(tile.BLOCK_M) * cdiv(F, tile.BLOCK_N)),)
    sizes: dict[str, Any] = {"H": H, "F": F, "itemsize": dtype.itemsize, "probs": itemsize(probs_R)}
    tokens = x_RH.shape[0] if gathered else None
    rank = adapter.rank if adapter else 0
    costs = partial(cost.fc1_act, **sizes, gated=act.GATED, bias=bias_EG is not None, tokens=tokens, rank=rank)
    if path == "warp_specialized":
        from .gluon_kernel import grouped_fc1_act_warp_specialized_kernel

        copied = x_RH if x_desc is None else None
        arguments = adapters.warp_specialized(arguments, copied is not None)
        arguments |= {"x_ptr": copied, "stride_x_r": copied and copied.strides[0]}
        arguments |= {"x_scales_desc": None, "w_scales": None, "a_scales_ptr": None}
        builder.launch(grouped_fc1_act_warp_specialized_kernel, grid, arguments, chosen, costs)
        return
    arguments |= {
        "x_ptr": x_RH,
        **expert_tensors.weight_arguments(w_EGH, "g", "h"),
        "stride_x_r": x_RH.strides[0],
        "PRECISION": target.precision(dtype),
    }
    builder.launch(_grouped_fc1_act_kernel, grid, arguments, chosen, costs)
