"""The `triton` implementation: plans launches pass by pass, allocates their outputs, and never waits.

Letters as in `functional.py`; `ops.py` defines the operators. Each is a plan (`kernels/launching`): it sees arrays in
place of tensors, and its allocations and launches are remembered by the kinds of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fusedmlp import environment
from fusedmlp.activation import Activation
from fusedmlp.kernels.device.activation import Options
from fusedmlp.kernels.dgrad_act.launch import grouped_dgrad_act_
from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
from fusedmlp.kernels.gemm.dprobs import Dprobs
from fusedmlp.kernels.gemm.launch import grouped_gemm_, plan_dprobs
from fusedmlp.kernels.launching.program import Builder
from fusedmlp.kernels.launching.run import Operator
from fusedmlp.kernels.operands import quantized
from fusedmlp.kernels.operands.arrays import Array, contiguous_strides
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.operands.quantized import Quantized
from fusedmlp.kernels.routing import order, plan
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_ as launch_grouped_wgrad_
from fusedmlp.operators import triton_adapters as adapters
from fusedmlp.operators import triton_eight_bit as eight_bit
from fusedmlp.operators import triton_tokens as tokens
from fusedmlp.operators.types import (
    MLPArguments,
    MLPBackwardArguments,
    MLPGrads,
    MLPOutput,
    RowCopies,
    RowOrder,
    WeightCopies,
)
from fusedmlp.recipe import BLOCKS, Formats

# A weight or bias as a plan sees it: `ExpertTensors` for a list of tensors, or a list of one packed array, or of none.
Experts = ExpertTensors | list[Array]
# A weight for a GEMM: also a quantized copy.
Weight = Experts | Quantized


WARP_SPECIALIZED = environment.warp_specialized()


def _plan_quantize_weights(builder: Builder, w: Experts, recipe: str) -> WeightCopies:
    """Both 8-bit copies of weights, read once."""
    return eight_bit.plan_quantize_weights(builder, _experts(w, 2), recipe)


def _plan_quantize_rows(builder: Builder, x_RC: Array, offsets: Array, num_experts: int, recipe: str) -> RowCopies:
    """Both 8-bit copies of rows, read once."""
    schedule = Schedule.planned(builder, offsets, x_RC.shape[0], num_experts)
    return eight_bit.plan_quantize_rows(builder, x_RC, schedule, recipe)


def empty_row_copies(x_RC: Tensor, num_experts: int, recipe: Recipe) -> RowCopies:
    """Uninitialised tensors with the shapes of `quantize_rows`."""
    (R, C), scales_dtype = x_RC.shape, quantized.SCALE_DTYPES[recipe]
    tiles = plan.max_tiles(R, num_experts, quantized.TILE_ROWS)
    scales = quantized.scales_shape(tiles, C, recipe)
    shapes = (R, C), quantized.token_copy_shape(tiles, C, recipe)
    made = [(x_RC.new_empty(s, dtype=torch.float8_e4m3fn), x_RC.new_empty(scales, dtype=scales_dtype)) for s in shapes]
    return RowCopies(*made[0], *made[1])


def _plan_grouped_gemm(
    builder: Builder,
    x_RK: Array,
    w: Weight,
    bias: Experts | None,
    offsets: Array,
    recipe: str,
    batch_invariant: bool,
) -> Array:
    """`y[r] = w[e] @ x[r] + bias[e]`, zero at padding rows."""
    weight, num_rows, bias_EN = _weight(w), x_RK.shape[0], _optional(bias, 1)
    schedule = Schedule.planned(builder, offsets, num_rows, weight.num_experts, batch_invariant)
    x_RK = builder.as_new(x_RK) if batch_invariant else x_RK
    if num_rows and (gemms := Formats.decode(recipe).gemms):
        return eight_bit.plan_grouped_gemm(builder, x_RK, weight, bias_EN, schedule, gemms)
    w_ENK = _experts(w, 2)
    y_RN = builder.empty((num_rows, w_ENK.base.shape[-2]), x_RK.dtype)
    grouped_gemm_.plan(builder, y_RN, x_RK, w_ENK, schedule, bias_EN=bias_EN)
    return y_RN


def _plan_grouped_mlp(builder: Builder, *args: Any) -> MLPOutput:
    """Passes (1) and (2), and the sums of tokens: `(y, h)`."""
    given: Any = _as_new(builder, MLPArguments(*args), "x", "probs")  # of arrays
    x_RH, row_ids_R, probs_R = given.x, given.row_ids, given.probs
    num_rows, dtype = (x_RH if row_ids_R is None else row_ids_R).shape[0], x_RH.dtype
    weights = eight_bit.Weights(_weight(given.fc1), _weight(given.fc2), _optional(given.bias2, 1))
    schedule = Schedule.planned(builder, given.offsets, num_rows, weights.fc1.num_experts, given.batch_invariant)
    act, bias1_EG, bias2_EH = act_options(given.activation), _optional(given.bias1, 1), _optional(given.bias2, 1)
    if num_rows and (gemms := Formats.decode(given.recipe).gemms):
        _refuse_adapters(given)
        rows = eight_bit.RowsOf(schedule, row_ids_R, None, probs_R)
        x = x_RH if given.x_scales is None else Quantized(x_RH, given.x_scales)
        out = eight_bit.plan_grouped_mlp(builder, x, weights, bias1_EG, rows, act, gemms)
        return out._replace(y=tokens.combined(builder, out.y, given.places, x_RH.shape[0]))
    if given.x_scales is not None:
        raise TypeError("x: expected rows, without a recipe or without rows; got an 8-bit copy of them")
    fc1_EGH, fc2_EHF = _experts(given.fc1, 2), _experts(given.fc2, 2)
    h_RG = builder.empty((num_rows, fc1_EGH.base.shape[-2]), dtype)
    y_RH = builder.empty((num_rows, x_RH.shape[1]), dtype)
    a_RF = builder.empty((num_rows, fc2_EHF.base.shape[-1]), dtype)
    adapter1 = adapters.plan(builder, x_RH, given.lora1, schedule, row_ids_R)
    epilogue: dict[str, Any] = {"bias_EG": bias1_EG, "probs_R": probs_R, "row_ids_R": row_ids_R}
    grouped_fc1_act_.plan(builder, h_RG, a_RF, x_RH, fc1_EGH, schedule, act, adapter=adapter1, **epilogue)
    adapter2 = adapters.plan(builder, a_RF, given.lora2, schedule)
    scale_R = probs_R if bias2_EH else None
    grouped_gemm_.plan(builder, y_RH, a_RF, fc2_EHF, schedule, bias_EN=bias2_EH, scale_R=scale_R, adapter=adapter2)
    y = tokens.combined(builder, y_RH, given.places, x_RH.shape[0])
    made: Any = y, h_RG, adapter1 and adapter1.t_Rr, adapter2 and adapter2.t_Rr
    return MLPOutput(*made)


def _plan_grouped_mlp_backward_(builder: Builder, *args: Any) -> MLPGrads:
    """Passes (3) to (6): dx, then gradients of weights; dx last where rows of tokens are sorted in its place. Then the
    sums of tokens, as the operands of the others have been freed.
    """
    given: Any = _as_new(builder, MLPBackwardArguments(*args), "dy", "h", "probs")  # of arrays
    dy_RH, x_RH, h_RG, row_ids_R, probs_R = given.dy, given.x, given.h, given.row_ids, given.probs
    (num_rows, G), dtype = h_RG.shape, h_RG.dtype  # not the rows of x, where rows are gathered from tokens
    if num_rows > 1 and h_RG.strides != contiguous_strides(h_RG.shape):
        raise ValueError(f"h: expected contiguous rows, strides {(G, 1)}; got {h_RG.strides}")
    weights = eight_bit.Weights(_weight(given.fc1), _weight(given.fc2), _optional(given.bias2, 1))
    schedule = Schedule.planned(builder, given.offsets, num_rows, weights.fc2.num_experts, given.batch_invariant)
    act, formats = act_options(given.activation), Formats.decode(given.recipe)
    if num_rows and formats.gemms:
        _refuse_adapters(given)
        dw, db = (_optional(given.dw1, 2), _optional(given.dw2, 2)), (_optional(given.db1, 1), _optional(given.db2, 1))
        grads = eight_bit.Grads(*dw, *db)
        rows_of = eight_bit.RowsOf(schedule, row_ids_R, given.places, probs_R)
        wanted = eight_bit.Wanted(given.accumulate1, given.accumulate2, given.need_dx, given.keep)
        x = x_RH if given.x_scales is None else Quantized(x_RH, given.x_scales)
        made = eight_bit.plan_grouped_mlp_backward_(
            builder, grads, dy_RH, x, h_RG, weights, rows_of, act, wanted, formats
        )
        return made._replace(dx=tokens.combined(builder, made.dx, given.places, dy_RH.shape[0]))
    fc2_EHF, dw1, dw2 = _experts(given.fc2, 2), _optional(given.dw1, 2), _optional(given.dw2, 2)
    dh_RG, a_RF = builder.empty((num_rows, G), dtype), builder.empty((num_rows, fc2_EHF.base.shape[-1]), dtype)
    dx_RH = builder.empty((num_rows, x_RH.shape[1]), x_RH.dtype) if given.need_dx else None
    first = tokens.choose(builder.target, given, schedule, fc2_EHF, dw1, dw2)
    dy = tokens.rows(builder, dy_RH, given, schedule, dx_RH if first.dy else None)
    bias2_EH = _optional(given.bias2, 1) if probs_R is not None else None
    adapter2 = adapters.plan(builder, dy_RH, adapters.transposed(given.lora2), schedule, row_ids_R)
    epilogue: dict[str, Any] = {"bias_EH": bias2_EH, "probs_R": probs_R, "row_ids_R": dy.row_ids, "adapter": adapter2}
    partial_PR = grouped_dgrad_act_.plan(builder, dh_RG, a_RF, dy.array, h_RG, fc2_EHF, schedule, act, **epilogue)
    dprobs = None
    if partial_PR is not None and probs_R is not None:
        dprobs = Dprobs(partial_PR, given.places, builder.empty((num_rows,), probs_R.dtype))
    adapter1 = adapters.plan(builder, dh_RG, adapters.transposed(given.lora1), schedule)

    def plan_dx() -> None:
        if dx_RH is not None:
            fc1_EHG = _experts(given.fc1, 2).T
            grouped_gemm_.plan(builder, dx_RH, dh_RG, fc1_EHG, schedule, dprobs=dprobs, adapter=adapter1)
        elif dprobs is not None:
            plan_dprobs(builder, dprobs)

    if not any(first):
        plan_dx()
    wgrad_ = partial(launch_grouped_wgrad_.plan, builder, order=schedule.order)
    adapters.plan_grads_(wgrad_, given.dlora2, adapter2, given.t2, dy_RH, a_RF, given.offsets, dy_row_ids=dy.segment)
    adapters.plan_grads_(wgrad_, given.dlora1, adapter1, given.t1, dh_RG, x_RH, given.offsets, x_row_ids=dy.segment)
    if dw2 or given.db2:
        of_rows: dict[str, Any] = {"scale_R": probs_R, "dy_row_ids": dy.segment, "accumulate": given.accumulate2}
        wgrad_(dw2, _optional(given.db2, 1), [dy.array], [a_RF], [given.offsets], **of_rows)
    x = tokens.rows(builder, x_RH, given, schedule, dx_RH if first.x else None)
    if dw1 or given.db1:
        of_rows = {"x_row_ids": x.segment, "accumulate": given.accumulate1}
        wgrad_(dw1, _optional(given.db1, 1), [dh_RG], [x.array], [given.offsets], **of_rows)
    if any(first):
        plan_dx()
    kept = (dh_RG, a_RF) if given.keep else (None, None)
    dx = tokens.combined(builder, dx_RH, given.places, dy_RH.shape[0])
    return MLPGrads(dx, dprobs and dprobs.out, *kept)


def _plan_grouped_wgrad_(
    builder: Builder,
    dw: Experts,
    db: Experts,
    dy: Sequence[Array],
    x: Sequence[Array],
    offsets: Sequence[Array],
    dy_row_ids: Sequence[Array],
    x_row_ids: Sequence[Array],
    accumulate: bool,
    recipe: str,
) -> None:
    """Passes (5) and (6) alone, over one or several segments."""
    dw_ENK, db_EN, wgrad = _optional(dw, 2), _optional(db, 1), Formats.decode(recipe).wgrad
    if dw_ENK and wgrad in BLOCKS and any(t.shape[0] for t in dy):
        eight_bit.plan_grouped_wgrad_(builder, dw_ENK, dy, x, offsets, dy_row_ids, x_row_ids, accumulate, wgrad)
        dw_ENK = None
    if dw_ENK or db_EN:
        launch_grouped_wgrad_.plan(
            builder, dw_ENK, db_EN, dy, x, offsets, accumulate=accumulate, dy_row_ids=dy_row_ids, x_row_ids=x_row_ids
        )


def _plan_order_rows(builder: Builder, top_k_index: Array, probs: Array, num_experts: int) -> RowOrder:
    """The order of rows by expert, from ids `[T, K]` of any integer dtype."""
    return RowOrder(*order.order_rows.plan(builder, top_k_index, probs, num_experts))


def _as_new(builder: Builder, given: Any, *names: str) -> Any:
    """In a batch-invariant call, copy these arguments unless they lie as new tensors do: paths depend on that."""
    arrays = {name: getattr(given, name) for name in names if given.batch_invariant}
    return given._replace(**{name: array and builder.as_new(array) for name, array in arrays.items()})


def _refuse_adapters(given: Any) -> None:
    if given.lora1 or given.lora2:
        raise NotImplementedError(
            'fc1_lora, fc2_lora: expected no 8-bit recipe, or impl="torch": kernels that multiply in 8 bits take no '
            "adapters"
        )


def _weight(seen: Weight) -> ExpertTensors | Quantized:
    return seen if isinstance(seen, Quantized) else _experts(seen, 2)


def _experts(seen: Weight, dim: int) -> ExpertTensors:
    if isinstance(seen, Quantized):
        raise TypeError("experts: expected weights, without a recipe or without rows; got an 8-bit copy of them")
    if not isinstance(seen, list):
        return seen
    if len(seen) != 1:
        raise TypeError(f"experts: expected a list of one tensor for each; got a tuple of {len(seen)}")
    return ExpertTensors.packed(seen[0], dim)


def _optional(seen: Experts | None, dim: int) -> ExpertTensors | None:
    return _experts(seen, dim) if seen else None


@lru_cache
def act_options(encoded: str) -> Options:
    """An encoded `Activation` as the kernels take it."""
    act = Activation.decode(encoded)
    step, limit = 2 if act.interleaved else 1, None if act.limit is None else float(act.limit)
    bound = None if act.linear_bound is None else float(act.linear_bound)
    return Options(act.gated, step, act.curve, float(act.sigmoid_alpha), limit, float(act.linear_offset), bound)


quantize_weights = Operator(_plan_quantize_weights, WARP_SPECIALIZED)
quantize_rows = Operator(_plan_quantize_rows, WARP_SPECIALIZED)
order_rows = Operator(_plan_order_rows, WARP_SPECIALIZED)
grouped_gemm = Operator(_plan_grouped_gemm, WARP_SPECIALIZED)
grouped_mlp = Operator(_plan_grouped_mlp, WARP_SPECIALIZED)
grouped_mlp_backward_ = Operator(
    _plan_grouped_mlp_backward_, WARP_SPECIALIZED, multiplied=MLPBackwardArguments._fields.index("dy")
)
checked_plan = Operator(plan.plan_of_counts.plan, WARP_SPECIALIZED)
wgrad_of_segments_ = Operator(_plan_grouped_wgrad_, WARP_SPECIALIZED, multiplied=2)


def expert_offsets(counts: Tensor, num_rows: int) -> Tensor:
    """The plan of a load, from rows per expert, `[E]`; wrong counts fail an assertion on the device."""
    made: Tensor
    made, valid = checked_plan(counts, num_rows)
    torch._assert_async(
        valid, f"tokens_per_expert: expected no negative count and a sum of at most {num_rows} (rows of x)"
    )
    return made


def grouped_wgrad_(
    dw: Sequence[Tensor],
    db: Sequence[Tensor],
    dy: Sequence[Tensor],
    x: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dy_row_ids: Sequence[Tensor],
    x_row_ids: Sequence[Tensor],
    accumulate: bool,
    recipe: str,
) -> None:
    """Passes (5) and (6) alone, over one or several segments; kernels add unrounded products with any recipe."""
    segments = tuple(dy), tuple(x), tuple(offsets), tuple(dy_row_ids), tuple(x_row_ids)
    wgrad_of_segments_([*dw], [*db], *segments, accumulate, recipe)
