"""The `triton` implementation: launches the kernels pass by pass, allocates their outputs, and never waits.

Letters as in `functional.py`. What the operators mean is written in `ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from fusedmlp import environment
from fusedmlp.activation import Activation
from fusedmlp.kernels.device.activation import Options
from fusedmlp.kernels.dgrad_act.launch import grouped_dgrad_act_
from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
from fusedmlp.kernels.gemm.dprobs import Dprobs
from fusedmlp.kernels.gemm.launch import grouped_gemm_
from fusedmlp.kernels.launching.replay import remembered
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.routing import order, plan
from fusedmlp.kernels.routing.combine import combine_
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.tiles import configs, tuned
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_ as launch_grouped_wgrad_
from fusedmlp.operators.types import MLPGrads, MLPOutput, Routing

configs.SPECIALISED = environment.specialised(configs.SPECIALISED)
if environment.tuned():
    _tiles = tuned.tiles_file(environment.cache_folder(), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not _tiles.exists():
        raise FileNotFoundError(
            f"FUSEDMLP_TUNED=1: expected {_tiles}, which `python -m fusedmlp tune` writes; it is not there"
        )
    tuned.load(_tiles)


def _on_own_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the device of the tensors; Triton launches on the current one."""

    @wraps(function)
    def run(*args: Any) -> Any:
        tensor: Any = None
        for arg in args:
            tensor = arg[0] if isinstance(arg, list) and arg else arg
            if isinstance(tensor, Tensor):
                break
        device = tensor.device
        if device.type == "cpu" or device.index == torch.get_device_module(device).current_device():
            return function(*args)
        with torch.get_device_module(device).device(device):
            return function(*args)

    return run


_checked_plan: Callable[[Tensor, int], plan.CheckedPlan] = remembered(plan.plan_of_counts)


@_on_own_device
def expert_offsets(counts: Tensor, num_rows: int) -> Tensor:
    """`[E]` rows per expert to a plan; wrong counts fail an assertion on the device."""
    made, valid = _checked_plan(counts, num_rows)
    torch._assert_async(
        valid, f"tokens_per_expert: expected no negative count and a sum of at most {num_rows} (rows of x)"
    )
    return made


@_on_own_device
@remembered
def route(top_k_index: Tensor, probs: Tensor, num_experts: int) -> Routing:
    """`[T, K]` ids of any integer dtype to the order of rows, by expert."""
    return Routing(*order.route(top_k_index, probs, num_experts))


@_on_own_device
@remembered
def combine(y_RH: Tensor, rows_R: Tensor, num_tokens: int) -> Tensor:
    """`out[t] = sum over k of y[rows[t * K + k]]`, `[T, H]`."""
    out_TH = y_RH.new_empty(num_tokens, y_RH.shape[1])
    combine_(out_TH, y_RH, rows_R)
    return out_TH


@_on_own_device
@remembered
def grouped_gemm(x_RK: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """`y[r] = w[e] @ x[r] + bias[e]`, zero at padding rows."""
    y_RN = x_RK.new_empty(x_RK.shape[0], w[0].shape[-2])
    w_ENK = ExpertTensors.of(w, 2)
    tiles = Schedule(offsets, x_RK.shape[0], w_ENK.num_experts)
    grouped_gemm_(y_RN, x_RK, w_ENK, tiles, bias_EN=_optional(bias, 1))
    return y_RN


@_on_own_device
@remembered
def grouped_mlp(
    x_RH: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    bias1: Sequence[Tensor],
    bias2: Sequence[Tensor],
    offsets: Tensor,
    tokens_R: Tensor | None,
    probs_R: Tensor | None,
    activation: str,
) -> MLPOutput:
    """Passes (1) and (2): `(y, h)`."""
    num_rows = (x_RH if tokens_R is None else tokens_R).shape[0]
    fc1_EGH = ExpertTensors.of(fc1, 2)
    tiles = Schedule(offsets, num_rows, fc1_EGH.num_experts)
    h_RG, y_RH = x_RH.new_empty(num_rows, fc1[0].shape[-2]), x_RH.new_empty(num_rows, x_RH.shape[1])
    a_RF = x_RH.new_empty(num_rows, fc2[0].shape[-1])
    grouped_fc1_act_(
        h_RG,
        a_RF,
        x_RH,
        fc1_EGH,
        tiles,
        _options(activation),
        bias_EG=_optional(bias1, 1),
        probs_R=probs_R,
        rows_R=tokens_R,
    )
    scale_R = probs_R if bias2 else None
    grouped_gemm_(y_RH, a_RF, ExpertTensors.of(fc2, 2), tiles, bias_EN=_optional(bias2, 1), scale_R=scale_R)
    return MLPOutput(y_RH, h_RG)


@_on_own_device
@remembered
def grouped_mlp_backward_(
    dw1: Sequence[Tensor],
    dw2: Sequence[Tensor],
    db1: Sequence[Tensor],
    db2: Sequence[Tensor],
    dy_RH: Tensor,
    x_RH: Tensor,
    h_RG: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    bias2: Sequence[Tensor],
    offsets: Tensor,
    tokens_R: Tensor | None,
    rows_R: Tensor | None,
    probs_R: Tensor | None,
    activation: str,
    accumulate1: bool,
    accumulate2: bool,
    need_dx: bool,
    keep: bool,
) -> MLPGrads:
    """Passes (3) to (6): dx early, so that its consumers can start, then the gradients of the weights."""
    num_rows = h_RG.shape[0]  # not that of x, where rows are gathered from tokens
    fc2_EHF = ExpertTensors.of(fc2, 2)
    tiles = Schedule(offsets, num_rows, fc2_EHF.num_experts)
    dh_RG, a_RF = torch.empty_like(h_RG), h_RG.new_empty(num_rows, fc2[0].shape[-1])
    partial = grouped_dgrad_act_(
        dh_RG,
        a_RF,
        dy_RH,
        h_RG,
        fc2_EHF,
        tiles,
        _options(activation),
        bias_EH=_optional(bias2, 1) if probs_R is not None else None,
        probs_R=probs_R,
        rows_R=tokens_R,
    )
    dx_RH = dprobs = None
    if partial is not None and probs_R is not None:
        dprobs = Dprobs(partial, rows_R, probs_R.new_empty(num_rows))
    if need_dx:
        dx_RH = x_RH.new_empty(num_rows, x_RH.shape[1])
        fc1_EGH = ExpertTensors.of(fc1, 2)
        fc1_T = fc1_EGH._replace(strides=fc1_EGH.strides[::-1])
        grouped_gemm_(dx_RH, dh_RG, fc1_T, tiles, dprobs=dprobs)
    elif dprobs is not None:
        sums_R = dprobs.partial.sum(0)
        dprobs.out.copy_(sums_R if rows_R is None else sums_R.index_select(0, rows_R))
    rows = [] if tokens_R is None else [tokens_R]
    _wgrad_(dw2, db2, [dy_RH], [a_RF], [offsets], rows, [], accumulate2, probs_R, tiles)
    _wgrad_(dw1, db1, [dh_RG], [x_RH], [offsets], [], rows, accumulate1, None, tiles)
    return MLPGrads(dx_RH, dprobs and dprobs.out, dh_RG if keep else None, a_RF if keep else None)


@_on_own_device
def grouped_wgrad_(
    dw: Sequence[Tensor],
    db: Sequence[Tensor],
    dy: Sequence[Tensor],
    x: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dy_rows: Sequence[Tensor],
    x_rows: Sequence[Tensor],
    accumulate: bool,
) -> None:
    """Passes (5) and (6) alone, over one or several segments."""
    if len(offsets) > 1:
        _wgrad_(dw, db, dy, x, offsets, dy_rows, x_rows, accumulate)
    else:
        dy_rows_R, x_rows_R = (own[0] if own else None for own in (dy_rows, x_rows))
        _wgrad_of_one_(dw, db, dy[0], x[0], offsets[0], dy_rows_R, x_rows_R, accumulate)


@remembered
def _wgrad_of_one_(
    dw: Sequence[Tensor],
    db: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    dy_rows_R: Tensor | None,
    x_rows_R: Tensor | None,
    accumulate: bool,
) -> None:
    dy_rows = [] if dy_rows_R is None else [dy_rows_R]
    x_rows = [] if x_rows_R is None else [x_rows_R]
    _wgrad_(dw, db, [dy], [x], [offsets], dy_rows, x_rows, accumulate)


def _wgrad_(
    dw: Sequence[Tensor],
    db: Sequence[Tensor],
    dy: Sequence[Tensor],
    x: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dy_rows: Sequence[Tensor],
    x_rows: Sequence[Tensor],
    accumulate: bool,
    scale_R: Tensor | None = None,
    tiles: Schedule | None = None,
) -> None:
    if dw or db:
        launch_grouped_wgrad_(
            ExpertTensors.of(dw, 2) if dw else None,
            _optional(db, 1),
            dy,
            x,
            offsets,
            accumulate=accumulate,
            scale_R=scale_R,
            dy_rows=dy_rows,
            x_rows=x_rows,
            order=None if tiles is None else tiles.order,
        )


def _optional(group: Sequence[Tensor], dim: int) -> ExpertTensors | None:
    return ExpertTensors.of(group, dim) if group else None


@lru_cache
def _options(encoded: str) -> Options:
    act = Activation.decode(encoded)
    step, limit = 2 if act.interleaved else 1, None if act.limit is None else float(act.limit)
    return Options(act.gated, step, act.curve, float(act.sigmoid_alpha), limit, float(act.linear_offset))
