"""Plans of the `triton` implementation for 8-bit recipes: operands are quantized on the way from GEMM to GEMM.

Quantization follows `torch_impl`: what it rounds to bf16 before it quantizes (x, dy, act * probs, the gradient of that,
dh) is bf16 here, too. Weights that come as they are get a copy for this call. Docs: docs/eight_bit.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from fusedmlp.kernels.act_quantize.launch import grouped_dgrad_act_quantize_
from fusedmlp.kernels.device.activation import Options
from fusedmlp.kernels.dgrad_act.launch import plan_bias_dprobs
from fusedmlp.kernels.gemm.dprobs import Dprobs
from fusedmlp.kernels.gemm.launch import plan_dprobs
from fusedmlp.kernels.launching.program import Builder
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.operands.quantized import TILE_ROWS, Quantized
from fusedmlp.kernels.quantize.launch import grouped_quantize_
from fusedmlp.kernels.quantize.weights_launch import grouped_quantize_weights_
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_ as launch_grouped_wgrad_
from fusedmlp.kernels.wgrad.quantized_launch import grouped_wgrad_quantized_
from fusedmlp.operators.eight_bit_call import EightBitCall, empty_token_copy, empty_weights, width
from fusedmlp.operators.types import MLPGrads, MLPOutput, RowCopies, WeightCopies
from fusedmlp.recipe import Formats


class Weights(NamedTuple):
    """Operands that are parameters; fc1 and fc2 may be copies, by in features in forward, by out in backward."""

    fc1: ExpertTensors | Quantized
    fc2: ExpertTensors | Quantized
    bias2: ExpertTensors | None


class Grads(NamedTuple):
    """Gradients of parameters to write; None: not wanted."""

    dw1: ExpertTensors | None
    dw2: ExpertTensors | None
    db1: ExpertTensors | None
    db2: ExpertTensors | None


class RowsOf(NamedTuple):
    """Rows of a call: their division, the token, place and probability of each; see `types.RowOrder`."""

    schedule: Schedule
    row_ids: Array | None
    places: Array | None
    probs: Array | None


class Wanted(NamedTuple):
    """Options of backward: gradients of weights to add to, and results to return."""

    accumulate1: bool
    accumulate2: bool
    dx: bool
    kept: bool


def plan_quantize_weights(builder: Builder, w_ENK: ExpertTensors, recipe: str) -> WeightCopies:
    """Both copies of weights, which are read once."""
    (N, K), E, kind = w_ENK.base.shape[-2:], w_ENK.num_experts, cast(Recipe, recipe)
    by_in, by_out = (empty_weights(builder, shape, kind) for shape in ((E, N, K), (E, K, N)))
    grouped_quantize_weights_.plan(builder, by_in, by_out, w_ENK, kind)
    return WeightCopies(*by_in, *by_out)


def plan_quantize_rows(builder: Builder, x_RC: Array, schedule: Schedule, recipe: str) -> RowCopies:
    """Both copies of rows, which are read once."""
    call = EightBitCall(builder, recipe, schedule)
    copies = call.row_copy(x_RC.shape[1]), call.token_copy(x_RC.shape[1])
    grouped_quantize_.plan(builder, *copies, x_RC, schedule, call.recipe)
    return RowCopies(*copies[0], *copies[1])


def plan_grouped_gemm(
    builder: Builder,
    x_RK: Array,
    w: ExpertTensors | Quantized,
    bias_EN: ExpertTensors | None,
    schedule: Schedule,
    recipe: str,
) -> Array:
    """`y[r] = w[e] @ x[r] + bias[e]`, zero at padding rows."""
    call = EightBitCall(builder, recipe, schedule)
    return call.product(call.copy_of_rows(x_RK, None), w, True, bias_EN=bias_EN)


def plan_grouped_mlp(
    builder: Builder,
    x: Array | Quantized,
    weights: Weights,
    bias1_EG: ExpertTensors | None,
    rows: RowsOf,
    act: Options,
    recipe: str,
) -> MLPOutput:
    """Passes (1) and (2): `(y, h)`."""
    call = EightBitCall(builder, recipe, rows.schedule)
    h_RG, a = call.activation(call.copy_of_rows(x, rows.row_ids), weights.fc1, bias1_EG, rows.probs, act)
    scale_R = rows.probs if weights.bias2 else None
    y_RH = call.product(a, weights.fc2, True, bias_EN=weights.bias2, scale_R=scale_R)
    return MLPOutput(y_RH, h_RG)  # type: ignore[arg-type]


def plan_grouped_mlp_backward_(
    builder: Builder,
    grads: Grads,
    dy_RH: Array,
    x: Array | Quantized,
    h_RG: Array,
    weights: Weights,
    rows: RowsOf,
    act: Options,
    wanted: Wanted,
    formats: Formats,
) -> MLPGrads:
    """Passes (3) to (6), as in `triton_impl`. `dh` and act * probs are in bf16, too, where something reads them."""
    call, (num_rows, G), F = EightBitCall(builder, formats.gemms, rows.schedule), h_RG.shape, width(h_RG.shape[1], act)
    in_8_bits = formats.wgrad == formats.gemms
    if isinstance(x, Quantized) and grads.dw1 and not in_8_bits:
        raise ValueError(f"x: expected rows, for wgrad={formats.wgrad!r}; got an 8-bit copy of them")
    quantize1, quantize2 = (dw is not None and in_8_bits for dw in (grads.dw1, grads.dw2))
    dy, dy_tokens = call.row_copy(dy_RH.shape[1]), call.token_copy(dy_RH.shape[1]) if quantize2 else None
    grouped_quantize_.plan(builder, dy, dy_tokens, dy_RH, call.schedule, call.recipe, row_ids_R=rows.row_ids)
    da_RF = call.product(dy, weights.fc2, False)
    dh_RG = a_RF = None
    if wanted.kept or grads.db1 or (grads.dw1 and not in_8_bits):
        dh_RG = builder.empty((num_rows, G), h_RG.dtype)
    if wanted.kept or (grads.dw2 and not in_8_bits):
        a_RF = builder.empty((num_rows, F), h_RG.dtype)
    dh, dh_tokens = call.row_copy(G) if wanted.dx else None, call.token_copy(G) if quantize1 else None
    a_tokens = call.token_copy(F) if quantize2 else None
    num_others = int(weights.bias2 is not None)
    own: dict[str, Any] = {"probs_R": rows.probs, "dh_RG": dh_RG, "a_RF": a_RF, "num_others": num_others}
    partial = grouped_dgrad_act_quantize_.plan(
        builder, dh, dh_tokens, a_tokens, da_RF, h_RG, call.schedule, act, call.recipe, **own
    )
    dx_RH = dprobs = None
    if partial is not None and rows.probs is not None:
        dprobs = Dprobs(partial, rows.places, builder.empty((num_rows,), rows.probs.dtype))
        if weights.bias2:  # y = probs * (... + bias2), so dprobs also gets dy . bias2
            last, blocks = partial[partial.shape[0] - 1], (TILE_ROWS, 64)
            plan_bias_dprobs(builder, last, dy_RH, weights.bias2, call.schedule, rows.row_ids, blocks)
    if dh is not None:
        dx_RH = call.product(dh, weights.fc1, False, dprobs=dprobs)
    elif dprobs is not None:
        plan_dprobs(builder, dprobs)
    if dy_tokens and a_tokens:
        call.wgrad_(grads.dw2, dy_tokens, a_tokens, wanted.accumulate2)
    if dh_tokens:
        call.wgrad_(grads.dw1, dh_tokens, call.copy_of_rows(x, rows.row_ids, tokens=True), wanted.accumulate1)
    x_RH = None if isinstance(x, Quantized) else x
    _plan_16_bit_wgrads(builder, grads, [dy_RH, a_RF, dh_RG, x_RH], rows, wanted, in_8_bits)
    kept = (dh_RG, a_RF) if wanted.kept else (None, None)
    return MLPGrads(dx_RH, dprobs and dprobs.out, *kept)  # type: ignore[arg-type]


def _plan_16_bit_wgrads(
    builder: Builder, grads: Grads, operands: list[Array | None], rows: RowsOf, wanted: Wanted, in_8_bits: bool
) -> None:
    """Gradients of biases, and those of weights that are not computed in 8 bits."""
    row_ids = () if rows.row_ids is None else (rows.row_ids,)
    dy, a, dh, x = operands
    for dw, db, left, right, gathered, accumulate in (
        (grads.dw2, grads.db2, dy, a, {"dy_row_ids": row_ids, "scale_R": rows.probs}, wanted.accumulate2),
        (grads.dw1, grads.db1, dh, x, {"x_row_ids": row_ids}, wanted.accumulate1),
    ):
        dw_ENK = None if in_8_bits else dw
        if (dw_ENK or db) and left is not None:
            options: dict[str, Any] = {"accumulate": accumulate, "order": rows.schedule.order, **gathered}
            offsets = [rows.schedule.offsets]
            launch_grouped_wgrad_.plan(
                builder, dw_ENK, db, [left], [left if right is None else right], offsets, **options
            )


def plan_grouped_wgrad_(
    builder: Builder,
    dw_ENK: ExpertTensors,
    dy: Sequence[Array],
    x: Sequence[Array],
    offsets: Sequence[Array],
    dy_row_ids: Sequence[Array],
    x_row_ids: Sequence[Array],
    accumulate: bool,
    recipe: str,
) -> None:
    """Passes (5) and (6) alone: one launch for all segments, whose operands are quantized into one buffer."""
    num_experts = dw_ENK.num_experts
    nums_rows = [t.shape[0] for t in dy_row_ids or dy]
    schedules = [
        Schedule.planned(builder, plan, num_rows, num_experts)
        for plan, num_rows in zip(offsets, nums_rows, strict=True)
    ]
    tiles = [schedule.max_tiles(TILE_ROWS) for schedule in schedules]
    copies, kind = [], cast(Recipe, recipe)
    for operand, row_ids in ((dy, dy_row_ids), (x, x_row_ids)):
        made = empty_token_copy(builder, sum(tiles), operand[0].shape[1], kind)
        for s, schedule in enumerate(schedules):
            segment = Quantized(*(part[sum(tiles[:s]) :] for part in made))
            row_ids_R = row_ids[s] if row_ids else None
            grouped_quantize_.plan(builder, None, segment, operand[s], schedule, kind, row_ids_R=row_ids_R)
        copies.append(made)
    grouped_wgrad_quantized_.plan(
        builder, dw_ENK, *copies, [schedule.offsets for schedule in schedules], tiles, kind, accumulate=accumulate
    )
