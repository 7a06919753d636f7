"""Plans of the `triton` implementation for 8-bit recipes: operands are quantized on the way from GEMM to GEMM.

Quantization follows `torch_impl`: what it rounds to bf16 before it quantizes (x, dy, act * probs, the gradient of that,
dh) is bf16 here, too. Copies of weights live for one call. Docs: docs/eight_bit.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from fusedmlp.kernels.act_quantize.launch import grouped_act_quantize_, grouped_dgrad_act_quantize_
from fusedmlp.kernels.device.activation import Options
from fusedmlp.kernels.dgrad_act.launch import plan_bias_dprobs
from fusedmlp.kernels.gemm.dprobs import Dprobs
from fusedmlp.kernels.gemm.launch import grouped_gemm_quantized_, plan_dprobs
from fusedmlp.kernels.launching.program import Builder
from fusedmlp.kernels.operands import quantized
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.operands.quantized import TILE_ROWS, Quantized
from fusedmlp.kernels.quantize.launch import grouped_quantize_
from fusedmlp.kernels.quantize.weights_launch import grouped_quantize_weights_
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_ as launch_grouped_wgrad_
from fusedmlp.kernels.wgrad.quantized_launch import grouped_wgrad_quantized_
from fusedmlp.operators.types import MLPGrads, MLPOutput
from fusedmlp.recipe import Formats


class _Call:
    """What the passes of one call share: the program that is planned, the recipe, and the division of rows."""

    def __init__(self, builder: Builder, recipe: str, schedule: Schedule) -> None:
        self.builder, self.recipe, self.schedule = builder, cast(Recipe, recipe), schedule
        self.num_tiles = schedule.max_tiles(TILE_ROWS)

    def copy(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> Quantized:
        """An empty copy."""
        elements = self.builder.empty(shape, torch.float8_e4m3fn)
        return Quantized(elements, self.builder.empty(scales, quantized.SCALE_DTYPES[self.recipe]))

    def row_copy(self, C: int) -> Quantized:
        """An empty row copy of `[R, C]`, for products over its columns."""
        return self.copy((self.schedule.num_rows, C), quantized.scales_shape(self.num_tiles, C, self.recipe))

    def token_copy(self, C: int) -> Quantized:
        """An empty token copy of `[R, C]`, for wgrad."""
        shape = quantized.token_copy_shape(self.num_tiles, C, self.recipe)
        return self.copy(shape, quantized.scales_shape(self.num_tiles, C, self.recipe))

    def rows_of(self, x_RC: Array, rows_R: Array | None) -> Quantized:
        """`x` quantized along its columns."""
        made = self.row_copy(x_RC.shape[1])
        grouped_quantize_.plan(self.builder, made, None, x_RC, self.schedule, self.recipe, rows_R=rows_R)
        return made

    def product(self, x: Quantized, w_ENK: ExpertTensors, forward: bool, **epilogue: Any) -> Array:
        """`x @ w^T`, forward, or `x @ w`: `[R, N]` or `[R, K]` in bf16. The weights are quantized for it."""
        (N, K), builder = w_ENK.base.shape[-2:], self.builder
        shape = (w_ENK.num_experts, *((N, K) if forward else (K, N)))
        made = self.copy(shape, quantized.weight_scales_shape(*shape, self.recipe))
        copies = (made, None) if forward else (None, made)
        grouped_quantize_weights_.plan(builder, *copies, w_ENK, self.recipe)
        y_RN = builder.empty((self.schedule.num_rows, shape[1]), torch.bfloat16)
        grouped_gemm_quantized_.plan(builder, y_RN, x, made, self.schedule, self.recipe, **epilogue)
        return y_RN


def plan_grouped_gemm(
    builder: Builder, x_RK: Array, w_ENK: ExpertTensors, bias_EN: ExpertTensors | None, schedule: Schedule, recipe: str
) -> Array:
    """`y[r] = w[e] @ x[r] + bias[e]`, zero at padding rows."""
    call = _Call(builder, recipe, schedule)
    return call.product(call.rows_of(x_RK, None), w_ENK, True, bias_EN=bias_EN)


def plan_grouped_mlp(
    builder: Builder,
    x_RH: Array,
    fc1_EGH: ExpertTensors,
    fc2_EHF: ExpertTensors,
    bias1_EG: ExpertTensors | None,
    bias2_EH: ExpertTensors | None,
    schedule: Schedule,
    tokens_R: Array | None,
    probs_R: Array | None,
    act: Options,
    recipe: str,
) -> MLPOutput:
    """Passes (1) and (2): `(y, h)`."""
    call = _Call(builder, recipe, schedule)
    h_RG = call.product(call.rows_of(x_RH, tokens_R), fc1_EGH, True, bias_EN=bias1_EG)
    a = call.row_copy(fc2_EHF.base.shape[-1])
    grouped_act_quantize_.plan(builder, a, h_RG, schedule, act, call.recipe, probs_R=probs_R)
    scale_R = probs_R if bias2_EH else None
    y_RH = call.product(a, fc2_EHF, True, bias_EN=bias2_EH, scale_R=scale_R)
    return MLPOutput(y_RH, h_RG)  # type: ignore[arg-type]


def plan_grouped_mlp_backward_(
    builder: Builder,
    dw1_EGH: ExpertTensors | None,
    dw2_EHF: ExpertTensors | None,
    db1_EG: ExpertTensors | None,
    db2_EH: ExpertTensors | None,
    dy_RH: Array,
    x_RH: Array,
    h_RG: Array,
    fc1_EGH: ExpertTensors,
    fc2_EHF: ExpertTensors,
    bias2_EH: ExpertTensors | None,
    schedule: Schedule,
    tokens_R: Array | None,
    rows_R: Array | None,
    probs_R: Array | None,
    act: Options,
    accumulate1: bool,
    accumulate2: bool,
    need_dx: bool,
    keep: bool,
    formats: Formats,
) -> MLPGrads:
    """Passes (3) to (6), as in `triton_impl`. `dh` and act * probs are in bf16, too, where something reads them."""
    call, (num_rows, G), F = _Call(builder, formats.gemms, schedule), h_RG.shape, fc2_EHF.base.shape[-1]
    in_8_bits = formats.wgrad == formats.gemms
    dy_tokens = call.token_copy(dy_RH.shape[1]) if dw2_EHF and in_8_bits else None
    dy = call.row_copy(dy_RH.shape[1])
    grouped_quantize_.plan(builder, dy, dy_tokens, dy_RH, schedule, call.recipe, rows_R=tokens_R)
    da_RF = call.product(dy, fc2_EHF, False)
    dh_RG = a_RF = None
    if keep or db1_EG or (dw1_EGH and not in_8_bits):
        dh_RG = builder.empty((num_rows, G), h_RG.dtype)
    if keep or (dw2_EHF and not in_8_bits):
        a_RF = builder.empty((num_rows, F), h_RG.dtype)
    dh = call.row_copy(G) if need_dx else None
    dh_tokens = call.token_copy(G) if dw1_EGH and in_8_bits else None
    a_tokens = call.token_copy(F) if dw2_EHF and in_8_bits else None
    copies = (dh, dh_tokens, a_tokens, da_RF, h_RG)
    own: dict[str, Any] = {"probs_R": probs_R, "dh_RG": dh_RG, "a_RF": a_RF, "num_others": int(bias2_EH is not None)}
    partial = grouped_dgrad_act_quantize_.plan(builder, *copies, schedule, act, call.recipe, **own)
    if bias2_EH and partial is not None:  # y = probs * (... + bias2), so dprobs also gets dy . bias2
        last = partial[partial.shape[0] - 1]
        plan_bias_dprobs(builder, last, dy_RH, bias2_EH, schedule, tokens_R, (TILE_ROWS, 64))
    dx_RH = dprobs = None
    if partial is not None and probs_R is not None:
        dprobs = Dprobs(partial, rows_R, builder.empty((num_rows,), probs_R.dtype))
    if dh is not None:
        dx_RH = call.product(dh, fc1_EGH, False, dprobs=dprobs)
    elif dprobs is not None:
        plan_dprobs(builder, dprobs)
    rows = () if tokens_R is None else (tokens_R,)
    for dw, db, dy_RN, x_RK, gathered, accumulate in (
        (dw2_EHF, db2_EH, dy_RH, a_RF, {"dy_rows": rows, "scale_R": probs_R}, accumulate2),
        (dw1_EGH, db1_EG, dh_RG, x_RH, {"x_rows": rows}, accumulate1),
    ):
        dw = None if in_8_bits else dw
        if dw or db:
            options: dict[str, Any] = {"accumulate": accumulate, "order": schedule.order, **gathered}
            launch_grouped_wgrad_.plan(
                builder, dw, db, [dy_RN], [x_RK] if dw else [dy_RN], [schedule.offsets], **options
            )
    if in_8_bits:
        _wgrad_(call, dw2_EHF, dy_tokens, a_tokens, accumulate2)
        if dw1_EGH:
            x_tokens = call.token_copy(x_RH.shape[1])
            grouped_quantize_.plan(builder, None, x_tokens, x_RH, schedule, call.recipe, rows_R=tokens_R)
            _wgrad_(call, dw1_EGH, dh_tokens, x_tokens, accumulate1)
    kept = (dh_RG, a_RF) if keep else (None, None)
    return MLPGrads(dx_RH, dprobs and dprobs.out, *kept)  # type: ignore[arg-type]


def _wgrad_(
    call: _Call, dw_ENK: ExpertTensors | None, dy: Quantized | None, x: Quantized | None, accumulate: bool
) -> None:
    if dw_ENK and dy and x:
        schedule, num_tiles = call.schedule, [call.num_tiles]
        own: dict[str, Any] = {"accumulate": accumulate, "order": schedule.order}
        grouped_wgrad_quantized_.plan(call.builder, dw_ENK, dy, x, [schedule.offsets], num_tiles, call.recipe, **own)


def plan_grouped_wgrad_(
    builder: Builder,
    dw_ENK: ExpertTensors,
    dy: Sequence[Array],
    x: Sequence[Array],
    offsets: Sequence[Array],
    dy_rows: Sequence[Array],
    x_rows: Sequence[Array],
    accumulate: bool,
    recipe: str,
) -> None:
    """Passes (5) and (6) alone: operands of all segments are quantized into one buffer and multiplied by one launch."""
    num_experts = dw_ENK.num_experts
    nums_rows = [t.shape[0] for t in dy_rows or dy]
    schedules = [
        Schedule.planned(builder, plan, num_rows, num_experts)
        for plan, num_rows in zip(offsets, nums_rows, strict=True)
    ]
    tiles = [schedule.max_tiles(TILE_ROWS) for schedule in schedules]
    copies, kind = [], cast(Recipe, recipe)
    for of, rows in ((dy, dy_rows), (x, x_rows)):
        C = of[0].shape[1]
        shape, scales = (size(sum(tiles), C, kind) for size in (quantized.token_copy_shape, quantized.scales_shape))
        elements = builder.empty(shape, torch.float8_e4m3fn)
        made = Quantized(elements, builder.empty(scales, quantized.SCALE_DTYPES[kind]))
        for s, schedule in enumerate(schedules):
            own = Quantized(*(part[sum(tiles[:s]) :] for part in made))
            rows_R = rows[s] if rows else None
            grouped_quantize_.plan(builder, None, own, of[s], schedule, kind, rows_R=rows_R)
        copies.append(made)
    firsts = [schedule.offsets for schedule in schedules]
    grouped_wgrad_quantized_.plan(builder, dw_ENK, *copies, firsts, tiles, kind, accumulate=accumulate)
