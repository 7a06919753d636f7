"""Passes (5) and (6): `dw[e, n, k] (+)= sum_r dy[r, n] x[r, k]` over the rows r of expert e.

In the same launch, the programs of the first column tile sum `db[e, n] = sum_r scale[r] dy[r, n]`. Rows may come in
several segments (micro-batches), each with its own `dy`, `x` and row offsets; all are summed before the one update
of `dw`. Each element of `dw` belongs to one program, which adds once and in a fixed order: the same bits every run.

The kernel computes `dw[e, n, k] = sum_r left[r, n] right[r, k]`. Left is `dy` and right is `x`, or, where `dw` is
stored `[K, N]`, the other way round (`SWAPPED`), so that rows of `dw` are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import cost, launches
from .alignment import vectors_fit
from .common import dot, expert_base, round_to
from .configs import Path, Tile, choose, dot_precision, has_path, num_programs, select
from .descriptors import fits
from .expert_tensors import ExpertTensors, device_table
from .schedule import expert_order, wgrad_tile
from .segments import load_rows_of, one_descriptor
from .wgrad_epilogue import add_to_descriptor, add_to_pointers


@triton.jit
def _column_sums(
    dy_desc,
    dy_ptr,
    scale_ptr,
    offsets_ptr,
    expert,
    column,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`sum_r scale[r] dy[r, column:column + COLUMNS]` over the rows of one expert."""
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    first = tl.load(offsets_ptr + expert)
    size = tl.load(offsets_ptr + expert + 1) - first
    for start in tl.range(0, size, ROWS, num_stages=3):  # without a dot, loads are pipelined on demand only
        wide = load_rows_of(dy_desc, dy_ptr, first, size, start, column, num_columns, ROWS, COLUMNS)
        wide = wide.to(tl.float32)
        if scale_ptr is not None:
            rows = start + tl.arange(0, ROWS)
            wide *= tl.load(scale_ptr + first + rows, mask=rows < size, other=0.0).to(tl.float32)[:, None]
        sums += tl.sum(wide, axis=0)
    return sums


@triton.jit(do_not_specialize=["num_segments", "num_experts"])
def _grouped_wgrad_kernel(
    left_ptr,
    left_desc,
    right_ptr,
    right_desc,
    dw_ptr,
    dw_table_ptr,
    dw_desc,
    db_ptr,
    db_table_ptr,
    scale_ptr,
    offsets_ptr,
    segments_ptr,
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
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    GROUP_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HAS_DW: tl.constexpr = (dw_ptr is not None) or (dw_desc is not None)
    num_n, num_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    # Experts without rows come last. Adding to them is nothing to do; their bias gradient, though, is zero.
    num_used = num_experts
    if ACCUMULATE and db_ptr is None:
        num_used = tl.load(order_ptr + num_experts)
    num_tiles = num_used * num_n * num_k
    # A program takes the next tile when it is free, whatever else runs on the GPU. Who computes a tile changes no bit.
    next_ptr = order_ptr + num_experts + 1
    tile = tl.atomic_add(next_ptr, 1, sem="relaxed")
    while tile < num_tiles:
        rank, n_tile, k_tile = wgrad_tile(tile, num_n, num_k, GROUP_N)
        expert = tl.load(order_ptr + rank)
        next_tile = tl.atomic_add(next_ptr, 1, sem="relaxed")  # while the expert is on its way
        n, k = n_tile * BLOCK_N, k_tile * BLOCK_K
        if db_ptr is not None and (n_tile if SWAPPED else k_tile) == 0:
            # A loop of its own: sums inside the GEMM's would move every tile of dy through registers, in all programs.
            if SWAPPED:
                sums = _column_sums(right_desc, right_ptr, scale_ptr, offsets_ptr, expert, k, K, BLOCK_R, BLOCK_K)
                column, columns = k + tl.arange(0, BLOCK_K), K
            else:
                sums = _column_sums(left_desc, left_ptr, scale_ptr, offsets_ptr, expert, n, N, BLOCK_R, BLOCK_N)
                column, columns = n + tl.arange(0, BLOCK_N), N
            db = expert_base(db_ptr, db_table_ptr, stride_db_e, expert)
            tl.store(db + column, round_to(sums, db_ptr.dtype.element_ty), mask=column < columns)

        if HAS_DW:
            acc_NK = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
            num_rows = 0
            for s in range(0, 1 if segments_ptr is None else num_segments):
                left, right, offsets = left_ptr, right_ptr, offsets_ptr
                if segments_ptr is not None:
                    offsets = tl.load(segments_ptr + 2 * num_segments + s).to(tl.pointer_type(tl.int32))
                    left, right = tl.load(segments_ptr + s), tl.load(segments_ptr + num_segments + s)
                    if left_desc is None:
                        left = left.to(tl.pointer_type(left_ptr.dtype.element_ty))
                        right = right.to(tl.pointer_type(right_ptr.dtype.element_ty))
                        if SEGMENTS_ALIGNED:
                            left, right = tl.multiple_of(left, 16), tl.multiple_of(right, 16)
                    else:
                        left, right = left.to(tl.int32), right.to(tl.int32)
                first = tl.load(offsets + expert)
                size = tl.load(offsets + expert + 1) - first
                num_rows += size
                for start in range(0, size, BLOCK_R):
                    left_RN = load_rows_of(left_desc, left, first, size, start, n, N, BLOCK_R, BLOCK_N)
                    right_RK = load_rows_of(right_desc, right, first, size, start, k, K, BLOCK_R, BLOCK_K)
                    acc_NK = dot(tl.trans(left_RN), right_RK, acc_NK, PRECISION)

            # With a bias, experts without rows are visited for its sake.
            if not ACCUMULATE or db_ptr is None or num_rows > 0:
                if dw_desc is not None:
                    place = num_experts - 1 - expert if REVERSED else expert
                    add_to_descriptor(dw_desc, place, n, k, acc_NK, ACCUMULATE, SUBTILES)
                else:
                    dw = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert, DW_ALIGNED)
                    add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, SUBTILES)
        tile = next_tile


class _Way(NamedTuple):
    """How operands reach the kernel; without descriptors, by pointers."""

    path: Path
    tile: Tile
    left: TensorDescriptor | None = None
    right: TensorDescriptor | None = None
    dw: TensorDescriptor | None = None
    coordinates: tuple[int, ...] = ()  # of every segment: all left ones, then all right ones


def _way(dw_ENK: ExpertTensors | None, left: Sequence[Tensor], right: Sequence[Tensor], num_experts: int) -> _Way:
    """Descriptors where all three operands fit them, judged by pointers and strides alone."""
    dtype, device = left[0].dtype, left[0].device
    rows_per_expert = sum(t.shape[0] for t in left) / num_experts
    if dw_ENK is not None and dw_ENK.table is None and has_path("wgrad", dtype, device, "tma"):
        tile = select("wgrad", dtype, device, "tma", rows_per_expert)
        shape = [num_experts, left[0].shape[1], right[0].shape[1]]
        strides = [abs(dw_ENK.stride_e), *dw_ENK.strides]
        lefts = one_descriptor(left, tile.BLOCK_M, tile.BLOCK_N)
        rights = one_descriptor(right, tile.BLOCK_M, tile.BLOCK_K)
        if lefts and rights and fits(dw_ENK.lowest.data_ptr(), dw_ENK.lowest.element_size(), shape, strides):
            block = [1, tile.BLOCK_N, tile.BLOCK_K // tile.SUBTILES]
            dw_desc = TensorDescriptor(dw_ENK.lowest, shape, strides, block)
            return _Way("tma", tile, lefts[0], rights[0], dw_desc, (*lefts[1], *rights[1]))
    tensors, sizes = (*left, *right) if dw_ENK else left, [t[0].shape[1] for t in (left, right) if t]
    aligned = vectors_fit(tensors, [dw_ENK] if dw_ENK else [], sizes)
    return _Way(*choose("wgrad", dtype, device, False, aligned, rows_per_expert))


def grouped_wgrad_(
    dw_ENK: ExpertTensors | None,
    db_EN: ExpertTensors | None,
    dy_RN: Sequence[Tensor],
    x_RK: Sequence[Tensor],
    offsets: Sequence[Tensor],
    *,
    accumulate: bool,
    scale_R: Tensor | None = None,
) -> None:
    """Adds to `dw`, or writes it (zeros for experts without rows); writes `db`, for one segment only.

    All segments have contiguous `dy [R_s, N]` and `x [R_s, K]`, and `offsets [E + 1]`. Without `dw`, `x` is unused.
    """
    num_experts, device = offsets[0].shape[0] - 1, dy_RN[0].device
    left, right, swapped = dy_RN, x_RK, False
    if dw_ENK and dw_ENK.strides[0] == 1 != dw_ENK.strides[1]:
        left, right, swapped = x_RK, dy_RN, True
        dw_ENK = dw_ENK._replace(strides=dw_ENK.strides[::-1])
    N, K = left[0].shape[1], right[0].shape[1] if dw_ENK else 1
    way = _way(dw_ENK, left, right, num_experts)
    tile, by_pointer = way.tile, way.dw is None
    segments = None
    if len(offsets) > 1:
        places = way.coordinates or tuple(t.data_ptr() for t in (*left, *right))
        segments = device_table((*places, *(t.data_ptr() for t in offsets)), device)
    order = expert_order(offsets[0], None if segments is None else segments[2 * len(offsets) :])
    num_tiles = num_experts * triton.cdiv(N, tile.BLOCK_N) * triton.cdiv(K, tile.BLOCK_K)
    _grouped_wgrad_kernel[(num_programs(tile, device, num_tiles),)](
        left[0] if by_pointer else None,
        way.left,
        right[0] if by_pointer and dw_ENK else None,
        way.right,
        dw_ENK.base if by_pointer and dw_ENK else None,
        dw_ENK.table if dw_ENK else None,
        way.dw,
        db_EN.base if db_EN else None,
        db_EN.table if db_EN else None,
        scale_R,
        offsets[0],
        segments,
        order,
        len(offsets),
        num_experts,
        N,
        K,
        dw_ENK.stride_e if dw_ENK else 0,
        *(dw_ENK.strides if dw_ENK else (0, 0)),
        db_EN.stride_e if db_EN else 0,
        accumulate,
        swapped,
        dw_ENK is not None and dw_ENK.stride_e < 0,
        dw_ENK is not None and dw_ENK.aligned,
        segments is not None and all(t.data_ptr() % 16 == 0 for t in (*left, *right)),
        tile.BLOCK_M,
        tile.BLOCK_N,
        tile.BLOCK_K,
        tile.SUBTILES,
        tile.GROUP_M,
        dot_precision(dy_RN[0].dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    launches.report(
        way.path,
        lambda: cost.wgrad(
            torch.stack([t.diff() for t in offsets]).sum(0).tolist(),
            dy_RN[0].shape[1],
            x_RK[0].shape[1] if dw_ENK else 0,
            dy_RN[0].element_size(),
            launches.size_of(dw_ENK.base if dw_ENK else None),
            accumulate=accumulate,
            bias_grad=launches.size_of(db_EN.base if db_EN else None),
            scale=launches.size_of(scale_R),
        ),
    )
