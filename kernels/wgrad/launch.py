"""Launch passes (5) and (6), the weight gradient: see `triton_kernel.py` and `gluon_kernel.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device.tile_order import deals_out
from ..launching import cost, launches
from ..launching.launcher import launch
from ..operands.expert_tensors import ExpertTensors
from ..tiles.configs import cdiv, consumers, dot_precision, num_programs, warp_specializes
from .operands import Operand, segment_table, way_of
from .steps import wgrad_plan
from .triton_kernel import _grouped_wgrad_kernel


def grouped_wgrad_(
    dw_ENK: ExpertTensors | None,
    db_EN: ExpertTensors | None,
    dy_RN: Sequence[Tensor],
    x_RK: Sequence[Tensor],
    offsets: Sequence[Tensor],
    *,
    accumulate: bool,
    scale_R: Tensor | None = None,
    dy_rows: Sequence[Tensor] = (),
    x_rows: Sequence[Tensor] = (),
    order: Tensor | None = None,
) -> None:
    """Adds to `dw`, or writes it (zeros for experts without rows); writes `db`, for one segment only.

    All segments have contiguous `dy [R_s, N]` and `x [R_s, K]`, and `offsets`, first rows `[E + 1]` or a plan. Without
    `dw`, `x` is unused. `order`: a plan's; without, a launch makes it.
    `dy_rows` or `x_rows` (`[R_s]` int32 or int64 of every segment, read for owned rows only) make that operand
    `[T_s, ...]`: row r takes its row `rows[r]`.
    """
    outputs = dw_ENK or db_EN
    assert outputs is not None
    num_experts, device = outputs.num_experts, dy_RN[0].device
    left, right, swapped = Operand(dy_RN, dy_rows), Operand(x_RK, x_rows), False
    if dw_ENK and dw_ENK.strides[0] == 1 != dw_ENK.strides[1]:
        left, right, swapped = right, left, True
        dw_ENK = dw_ENK._replace(strides=dw_ENK.strides[::-1])
    N, K = left.columns, right.columns if dw_ENK else 1
    way = way_of(dw_ENK, left, right, num_experts, accumulate)
    tile = way.tile
    if way.path == "specialised" and db_EN is not None:
        order = wgrad_plan(offsets[0], num_experts).order if order is None else order
        grouped_wgrad_(
            None, db_EN, dy_RN, x_RK, offsets, accumulate=accumulate, scale_R=scale_R, dy_rows=dy_rows, order=order
        )
        db_EN = scale_R = None
    left_rows, right_rows = (operand.rows[0] if operand.rows else None for operand in (left, right))
    segments = steps = None
    vectors = [1, 1]
    if len(offsets) > 1:
        segments = segment_table(way, left, right, offsets)
        num_rows = sum(t.shape[0] for t in left.rows or left.tensors)
        gathered = left.gathered(), right.gathered()
        order, steps, left_rows, right_rows = wgrad_plan(
            offsets[0], num_experts, segments, len(offsets), num_rows, tile.BLOCK_M, *gathered
        )
        vectors = [each.unit // left.tensors[0].element_size() if each else 1 for each in gathered]
    elif order is None:
        order = wgrad_plan(offsets[0], num_experts).order
    tiles = cdiv(N, tile.BLOCK_N) * cdiv(K, tile.BLOCK_K)
    programs = num_programs(tile, device, num_experts * tiles)
    grid = (programs if deals_out(tiles, programs) else num_experts * tiles,)
    strides_dw = (dw_ENK.stride_e, *dw_ENK.strides) if dw_ENK else (0, 0, 0)
    reversed_, aligned = dw_ENK is not None and dw_ENK.stride_e < 0, dw_ENK is not None and dw_ENK.aligned
    dw = dw_ENK.base if way.dw is None and dw_ENK else None, dw_ENK.table if dw_ENK else None, way.dw
    if way.path == "specialised":
        from .gluon_kernel import grouped_wgrad_specialised_kernel

        launch(
            grouped_wgrad_specialised_kernel,
            grid,
            *(way.left, left_rows, way.right, right_rows, *dw, offsets[0], segments, steps, order),
            *(len(offsets), num_experts, N, K, *strides_dw),
            *(accumulate, reversed_, aligned, consumers(device), tile),
            num_warps=tile.num_warps,
        )
    else:
        launch(
            _grouped_wgrad_kernel,
            grid,
            left.tensors[0] if way.left is None else None,
            way.left,
            left_rows,
            right.tensors[0] if way.right is None and dw_ENK else None,
            way.right,
            right_rows if dw_ENK else None,
            *dw,
            db_EN.base if db_EN else None,
            db_EN.table if db_EN else None,
            scale_R,
            offsets[0],
            segments,
            steps,
            order,
            len(offsets),
            num_experts,
            N,
            K,
            *strides_dw,
            db_EN.stride_e if db_EN else 0,
            accumulate,
            swapped,
            reversed_,
            aligned,
            segments is not None and left.aligned and right.aligned,
            *vectors,
            tile,
            way.path == "tma" and tile.PER_SM == 1 and warp_specializes(device),
            dot_precision(dy_RN[0].dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    launches.report(
        way.path,
        lambda: cost.wgrad(
            torch.stack([t[: num_experts + 1].diff() for t in offsets]).sum(0).tolist(),
            dy_RN[0].shape[1],
            x_RK[0].shape[1] if dw_ENK else 0,
            dy_RN[0].element_size(),
            launches.size_of(dw_ENK.base if dw_ENK else None),
            accumulate=accumulate,
            bias_grad=launches.size_of(db_EN.base if db_EN else None),
            scale=launches.size_of(scale_R),
            dy_tokens=sum(t.shape[0] for t in dy_RN) if dy_rows else None,
            x_tokens=sum(t.shape[0] for t in x_RK) if x_rows else None,
        ),
    )
