"""Launch pass (1) of 8-bit operands, fc1 with the activation and its quantization: see `gluon_kernel.py`."""

from __future__ import annotations

from functools import partial

from ..device import activation
from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands import adapter, descriptors, expert_tensors
from ..operands.arrays import Array, itemsize
from ..operands.expert_tensors import ExpertTensors
from ..operands.quantized import CHUNK, Quantized
from ..routing.plan import Schedule
from ..tiles.rounding import cdiv
from ..tiles.select import Target, eight_bit
from ..tiles.table import Key, Recipe
from ..warp_specialized import gluon_missing


def has_kernel(target: Target, recipe: Recipe, act: activation.Options, F: int) -> bool:
    """Whether `grouped_fc1_act_quantized_` can be launched: if not, two launches compute the same.

    Scales of weights for mxfp8 are loaded by chunks of 128 rows, and linear channels begin at row F.
    """
    whole_chunks = activation.halves(act) == 1 or F % CHUNK == 0
    return whole_chunks and Key("fc1_act", "warp_specialized", recipe, "long") in target.tiles


@Launcher
def grouped_fc1_act_quantized_(
    builder: Builder,
    h_RG: Array,
    a_rows: Quantized,
    x_RH: Quantized,
    w_EGH: Quantized,
    schedule: Schedule,
    act: activation.Options,
    recipe: Recipe,
    *,
    bias_EG: ExpertTensors | None = None,
    probs_R: Array | None = None,
) -> None:
    """Writes all of `h`, zeros at padding rows, and all that experts own of the row copy of `a = act(h) * probs`.

    `h` and the copy have the bits that `grouped_gemm_quantized_` and then `grouped_act_quantize_` make of a row copy of
    `x` and of weights in 8 bits. For a row of swiglu this reads 4 F bytes less: `h`. F: see `has_kernel`.

    Raises:
        NotImplementedError: the target has no kernel for the recipe.
        ValueError: TMA cannot move the operands.
    """
    target, F, H = builder.target, a_rows.elements.shape[1], x_RH.elements.shape[1]
    (num_rows, G), halves = h_RG.shape, activation.halves(act)
    if not num_rows * F:
        return
    chosen = eight_bit("fc1_act", recipe, target, gluon_missing())
    tile = chosen.tile
    rows = target.consumer_rows(chosen.path, tile)
    # fp8_block: a block of `a` at a time; mxfp8: as many columns as of each half of `h`, whose channels may alternate.
    width_h, width_a = tile.BLOCK_N // tile.SUBTILES, CHUNK
    if recipe == "mxfp8":
        width_h, width_a = width_h * act.CHANNEL_STEP, width_h
    arguments = {
        **descriptors.eight_bit(x_RH, w_EGH, rows, tile, halves),
        **adapter.NONE,
        "x_ptr": None,
        "row_ids_ptr": None,
        **expert_tensors.arguments("bias", bias_EG),
        "probs_ptr": probs_R,
        "h_ptr": h_RG,
        "h_desc": descriptors.ragged_rows(h_RG, rows, width_h, halves=halves, apart=True),
        "a_ptr": None,
        "a_desc": descriptors.ragged_rows(a_rows.elements, rows, width_a),
        "a_scales_ptr": a_rows.scales,
        "tiles_ptr": schedule.tiles(builder, tile.BLOCK_M),
        "H": H,
        "F": F,
        "stride_x_r": None,
        "stride_h_r": h_RG.strides[0],
        "stride_a_r": None,
        "ACT": act,
    }
    grid = (target.num_programs(tile, schedule.max_tiles(tile.BLOCK_M) * cdiv(G, tile.BLOCK_N)),)
    bias = itemsize(bias_EG and bias_EG.base)
    costs = partial(
        cost.fc1_act_quantized,
        H=H,
        F=F,
        recipe=recipe,
        h=h_RG.dtype.itemsize,
        gated=act.GATED,
        bias=bias,
        probs=itemsize(probs_R),
    )
    from .gluon_kernel import grouped_fc1_act_warp_specialized_kernel as kernel

    descriptors.check_fit(arguments)
    builder.launch(kernel, grid, arguments, chosen, costs)
