"""Launch passes (5) and (6), the weight gradient: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..device.tile_order import deals_out
from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands import expert_tensors
from ..operands.arrays import Array, itemsize
from ..operands.expert_tensors import ExpertTensors
from ..tiles.rounding import cdiv
from .operands import Operand, plan_operands, segment_table
from .steps import plan_steps
from .triton_kernel import _grouped_wgrad_kernel


@Launcher
def grouped_wgrad_(
    builder: Builder,
    dw_ENK: ExpertTensors | None,
    db_EN: ExpertTensors | None,
    dy_RN: Sequence[Array],
    x_RK: Sequence[Array],
    offsets: Sequence[Array],
    *,
    accumulate: bool,
    scale_R: Array | None = None,
    dy_row_ids: Sequence[Array] = (),
    x_row_ids: Sequence[Array] = (),
    order: Array | None = None,
) -> None:
    """Add to `dw`, or write it (zeros for experts without rows); write `db`, for one segment only (else ValueError).

    All segments have contiguous `dy [R_s, N]` and `x [R_s, K]`, and `offsets`, first rows `[E + 1]` or a plan. Without
    `dw`, `x` is unused. `order`: from a plan; if None, a launch computes it. With `dy_row_ids` (`x_row_ids`), `[R_s]`
    int32 or int64 of every segment, `dy` (`x`) is `[T_s, ...]`, and row r is its row `dy_row_ids[r]`; ids of padding
    rows are not read.
    """
    outputs, target, dtype = dw_ENK or db_EN, builder.target, dy_RN[0].dtype
    assert outputs is not None
    num_experts, num_segments = outputs.num_experts, len(offsets)
    if db_EN is not None and num_segments > 1:
        raise ValueError(f"db: expected one segment; got {num_segments}")
    left, right, swapped = Operand(dy_RN, dy_row_ids), Operand(x_RK, x_row_ids), False
    sizes: dict[str, Any] = _sizes(dw_ENK, db_EN, left, right)
    costs = partial(cost.wgrad, **sizes, scale=itemsize(scale_R), accumulate=accumulate)
    if dw_ENK and dw_ENK.strides[0] == 1 != dw_ENK.strides[1]:
        left, right, swapped = right, left, True
        dw_ENK = dw_ENK.T
    N, K = left.columns, right.columns if dw_ENK else 1
    plan = plan_operands(target, dw_ENK, left, right, num_experts, accumulate)
    path, tile = plan.chosen.path, plan.chosen.tile
    if path == "warp_specialized" and db_EN is not None:
        order = order or plan_steps(builder, offsets[0], num_experts).order
        rest: dict[str, Any] = {"accumulate": accumulate, "scale_R": scale_R, "dy_row_ids": dy_row_ids, "order": order}
        grouped_wgrad_.plan(builder, None, db_EN, dy_RN, x_RK, offsets, **rest)
        db_EN, costs = None, partial(costs, bias_grad=0, scale=0)
    left_row_ids, right_row_ids = (operand.row_ids[0] if operand.row_ids else None for operand in (left, right))
    segments = steps = None
    vectors = [1, 1]
    if num_segments > 1:
        segments = segment_table(builder, plan, left, right, offsets)
        gathered = left.gathered(), right.gathered()
        order, steps, left_row_ids, right_row_ids = plan_steps(
            builder, offsets[0], num_experts, segments, num_segments, left.num_rows, tile.BLOCK_M, *gathered
        )
        vectors = [each.unit // dtype.itemsize if each else 1 for each in gathered]
    elif order is None:
        order = plan_steps(builder, offsets[0], num_experts).order
    tiles = cdiv(N, tile.BLOCK_N) * cdiv(K, tile.BLOCK_K)
    programs = target.num_programs(tile, num_experts * tiles)
    stay = path == "warp_specialized" or deals_out(tiles, programs)
    grid = (programs if stay else num_experts * tiles,)
    arguments: dict[str, Any] = {
        "left_desc": plan.left,
        "left_row_ids_ptr": left_row_ids,
        "right_desc": plan.right,
        "right_row_ids_ptr": right_row_ids if dw_ENK else None,
        "dw_ptr": dw_ENK.base if plan.dw is None and dw_ENK else None,
        "dw_table_ptr": dw_ENK and dw_ENK.table,
        "dw_desc": plan.dw,
        "offsets_ptr": offsets[0],
        "segments_ptr": segments,
        "steps_ptr": steps,
        "order_ptr": order,
        "num_segments": num_segments,
        "num_experts": num_experts,
        "N": N,
        "K": K,
        "stride_dw_e": dw_ENK.stride_e if dw_ENK else 0,
        "stride_dw_n": dw_ENK.strides[0] if dw_ENK else 0,
        "stride_dw_k": dw_ENK.strides[1] if dw_ENK else 0,
        "ACCUMULATE": accumulate,
        "REVERSED": dw_ENK is not None and dw_ENK.stride_e < 0,
        "DW_ALIGNED": dw_ENK is not None and dw_ENK.aligned,
    }
    if path == "warp_specialized":
        from .gluon_kernel import grouped_wgrad_warp_specialized_kernel

        for side, operand, desc in (("left", left, plan.left), ("right", right, plan.right)):
            copied = operand.arrays[0] if desc is None else None
            stride = vectors[side == "right"] if segments else operand.arrays[0].strides[0]
            arguments |= {f"{side}_ptr": copied, f"stride_{side}_r": copied and stride, f"{side}_scales_desc": None}
        builder.launch(grouped_wgrad_warp_specialized_kernel, grid, arguments, plan.chosen, costs)
        return
    arguments |= {
        "left_ptr": left.arrays[0] if plan.left is None else None,
        "right_ptr": right.arrays[0] if plan.right is None and dw_ENK else None,
        **expert_tensors.arguments("db", db_EN),
        "scale_ptr": scale_R,
        "SWAPPED": swapped,
        "SEGMENTS_ALIGNED": segments is not None and left.aligned and right.aligned,
        "LEFT_VECTOR": vectors[0],
        "RIGHT_VECTOR": vectors[1],
        "WARP_SPECIALIZE": path == "tma" and tile.PER_SM == 1 and target.triton_warp_specializes,
        "PRECISION": target.precision(dtype),
    }
    builder.launch(_grouped_wgrad_kernel, grid, arguments, plan.chosen, costs)


def _sizes(dw_ENK: ExpertTensors | None, db_EN: ExpertTensors | None, dy: Operand, x: Operand) -> dict[str, int | None]:
    """Sizes as `cost.wgrad` takes them."""
    dy_RN, x_RK = dy.arrays, x.arrays
    return {
        "N": dy.columns,
        "K": x.columns if dw_ENK else 0,
        "itemsize": dy_RN[0].dtype.itemsize,
        "grad": itemsize(dw_ENK and dw_ENK.base),
        "bias_grad": itemsize(db_EN and db_EN.base),
        "dy_tokens": sum(t.shape[0] for t in dy_RN) if dy.row_ids else None,
        "x_tokens": sum(t.shape[0] for t in x_RK) if x.row_ids else None,
    }
