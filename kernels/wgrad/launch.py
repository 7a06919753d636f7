"""Passes (5) and (6): `dw[e, n, k] (+)= sum_r dy[r, n] x[r, k]` over the rows r of expert e.

In the same launch, the programs of the first column tile sum `db[e, n] = sum_r scale[r] dy[r, n]`. Rows may come in
several segments (micro-batches), each with its own `dy`, `x` and row offsets; all are summed before the one update
of `dw`. Each element of `dw` belongs to one program, which adds once and in a fixed order: the same bits every run.

With `dy_rows` or `x_rows`, row r takes row `rows[r]` of that operand: tokens need not be permuted before. It then
comes by pointers, through cp.async, also where the other one and `dw` go by TMA, which follows an index on Blackwell
alone (there see `wgrad/gluon_kernel.py`).

The kernel computes `dw[e, n, k] = sum_r left[r, n] right[r, k]`. Left is `dy` and right is `x`, or, where `dw` is
stored `[K, N]`, the other way round (`SWAPPED`), so that rows of `dw` are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device.tile_order import deals_out, num_turns, place_at, wgrad_tile
from ..device.tiles import dot, expert_base, round_to, zeros
from ..launching import cost, launches
from ..launching.launcher import launch
from ..operands.expert_tensors import ExpertTensors
from ..tiles.configs import BY_DESCRIPTORS, cdiv, consumers, dot_precision, num_programs, warp_specializes
from .epilogue import add_to_descriptor, add_to_pointers
from .operands import Operand, segment_table, way_of
from .segments import load_rows_of, load_rows_of_step, load_step
from .steps import wgrad_plan


@triton.jit
def _bias_grads(
    db_ptr,
    db_table_ptr,
    stride_db_e,
    dy_desc,
    dy_ptr,
    dy_rows_ptr,
    scale_ptr,
    offsets_ptr,
    order_ptr,
    num_experts,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`db[e, n] = sum_r scale[r] dy[r, n]`; all programs of a launch share the work."""
    num_n = tl.cdiv(N, COLUMNS)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(0, num_turns(num_experts * num_n, program, programs)):
        place = place_at(turn, program, programs)
        expert, n = tl.load(order_ptr + place // num_n), place % num_n * COLUMNS
        first = tl.load(offsets_ptr + expert)
        size = tl.load(offsets_ptr + expert + 1) - first
        sums_RN = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.range(0, size, ROWS, num_stages=3):  # without a dot, loads are pipelined on demand only
            dy_RN = load_rows_of(dy_desc, dy_ptr, dy_rows_ptr, first, size, start, n, N, ROWS, COLUMNS).to(tl.float32)
            if scale_ptr is not None:
                rows = start + tl.arange(0, ROWS)
                dy_RN *= tl.load(scale_ptr + first + rows, mask=rows < size, other=0.0).to(tl.float32)[:, None]
            sums_RN += dy_RN
        db, column = expert_base(db_ptr, db_table_ptr, stride_db_e, expert), n + tl.arange(0, COLUMNS)
        tl.store(db + column, round_to(tl.sum(sums_RN, axis=0), db_ptr.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["num_segments", "num_experts"])
def _grouped_wgrad_kernel(
    left_ptr,
    left_desc,
    left_rows_ptr,
    right_ptr,
    right_desc,
    right_rows_ptr,
    dw_ptr,
    dw_table_ptr,
    dw_desc,
    db_ptr,
    db_table_ptr,
    scale_ptr,
    offsets_ptr,
    segments_ptr,
    steps_ptr,
    order_ptr,
    num_segments,
    num_experts,
    N,
    K,
    stride_dw_e,
    stride_dw_n,
    stride_dw_k,
    stride_db_e,
    ACCUMULATE: tl.constexpr,
    SWAPPED: tl.constexpr,  # left is x
    REVERSED: tl.constexpr,  # dw_desc starts at the last expert
    DW_ALIGNED: tl.constexpr,  # every expert's address is a multiple of 16 bytes
    SEGMENTS_ALIGNED: tl.constexpr,  # and every segment's
    LEFT_VECTOR: tl.constexpr,  # elements of the unit of its rows' places, where several segments are gathered
    RIGHT_VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    GROUP_N: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,  # by Triton: loads, products and sums on their way out have warps of their own
    PRECISION: tl.constexpr,
):
    HAS_DW: tl.constexpr = (dw_ptr is not None) or (dw_desc is not None)
    if db_ptr is not None:
        # Loops of their own: sums inside the GEMM's would move every tile of dy through registers, in all programs.
        if SWAPPED:
            _bias_grads(
                *(db_ptr, db_table_ptr, stride_db_e, right_desc, right_ptr, right_rows_ptr, scale_ptr, offsets_ptr),
                *(order_ptr, num_experts, K, BLOCK_R, BLOCK_K),
            )
        else:
            _bias_grads(
                *(db_ptr, db_table_ptr, stride_db_e, left_desc, left_ptr, left_rows_ptr, scale_ptr, offsets_ptr),
                *(order_ptr, num_experts, N, BLOCK_R, BLOCK_N),
            )

    if HAS_DW:
        num_n, num_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
        # Experts without rows come last, and adding to them is nothing to do.
        num_used = tl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
        # Persistent, and one loop with that over rows if compiled so: see `device/tile_order.py`.
        program, programs = tl.program_id(0), tl.num_programs(0)
        turns = num_turns(num_used * num_n * num_k, program, programs)
        for turn in tl.range(0, turns, flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE):
            rank, n_tile, k_tile = wgrad_tile(place_at(turn, program, programs), num_n, num_k, GROUP_N)
            expert = tl.load(order_ptr + rank)
            n, k = n_tile * BLOCK_N, k_tile * BLOCK_K
            acc_NK = zeros(BLOCK_N, BLOCK_K, turns, FLATTEN)
            # One step of zeros where an expert without rows is written.
            if segments_ptr is None:
                first = tl.load(offsets_ptr + expert)
                size = tl.load(offsets_ptr + expert + 1) - first
                steps = tl.maximum(tl.cdiv(size, BLOCK_R), 1)
                tl.assume(steps > 0)
                for step in range(0, steps):
                    at = step * BLOCK_R
                    left_RN = load_rows_of(left_desc, left_ptr, left_rows_ptr, first, size, at, n, N, BLOCK_R, BLOCK_N)
                    right_RK = load_rows_of(
                        right_desc, right_ptr, right_rows_ptr, first, size, at, k, K, BLOCK_R, BLOCK_K
                    )
                    acc_NK = dot(tl.trans(left_RN), right_RK, acc_NK, PRECISION)
            else:
                first_step = tl.load(steps_ptr + expert)
                steps = tl.load(steps_ptr + expert + 1) - first_step
                tl.assume(steps > 0)
                # A step is read while that before is multiplied: what a load's address waits for is not pipelined.
                read = load_step(steps_ptr, segments_ptr, first_step, num_segments, num_experts)
                for i in range(0, steps):
                    row, rows, left, right = read
                    step = first_step + i
                    left_RN = load_rows_of_step(
                        *(left_desc, left_ptr, left_rows_ptr, step, left, row, rows, n, N),
                        *(BLOCK_R, BLOCK_N, LEFT_VECTOR, SEGMENTS_ALIGNED),
                    )
                    right_RK = load_rows_of_step(
                        *(right_desc, right_ptr, right_rows_ptr, step, right, row, rows, k, K),
                        *(BLOCK_R, BLOCK_K, RIGHT_VECTOR, SEGMENTS_ALIGNED),
                    )
                    acc_NK = dot(tl.trans(left_RN), right_RK, acc_NK, PRECISION)
                    step = first_step + tl.minimum(i + 1, steps - 1)
                    read = load_step(steps_ptr, segments_ptr, step, num_segments, num_experts)

            if dw_desc is not None:
                place = num_experts - 1 - expert if REVERSED else expert
                add_to_descriptor(dw_desc, place, n, k, acc_NK, ACCUMULATE, SUBTILES)
            else:
                dw = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert, DW_ALIGNED)
                add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, SUBTILES)


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
    blocks = tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K, tile.SUBTILES, tile.GROUP_M
    dw = dw_ENK.base if way.dw is None and dw_ENK else None, dw_ENK.table if dw_ENK else None, way.dw
    if way.path == "specialised":
        from .gluon_kernel import grouped_wgrad_specialised_kernel

        launch(
            grouped_wgrad_specialised_kernel,
            grid,
            *(way.left, left_rows, way.right, right_rows, *dw, offsets[0], segments, steps, order),
            *(len(offsets), num_experts, N, K, *strides_dw),
            *(accumulate, reversed_, aligned, consumers(device), *blocks, tile.num_stages),
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
            *blocks,
            way.path in BY_DESCRIPTORS,
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
