"""Passes (5) and (6): `dw[e, n, k] (+)= sum_r dy[r, n] x[r, k]` over the rows r of expert e.

In the same launch, in loops of their own, all programs sum `db[e, n] = sum_r scale[r] dy[r, n]`. Rows may come in
several segments (micro-batches), each with its own `dy`, `x` and row offsets; all are summed before the one update
of `dw`. Each element of `dw` belongs to one program, which adds once and in a fixed order: the same bits every run.

With row ids of an operand, row r takes its row `row_ids[r]`: tokens need not be permuted before. It is then loaded by
pointers, through cp.async; on path "gather" the other operand and `dw` go by TMA, which gathers rows on Blackwell alone
(there see `wgrad/gluon_kernel.py`). With several segments `left_row_ids_ptr` and `right_row_ids_ptr` point to a table
of places instead, which says where each row of each step lies and is written by `wgrad/steps.py`.

The kernel computes `dw[e, n, k] = sum_r left[r, n] right[r, k]`. Left is `dy` and right is `x`, or, where `dw` is
stored `[K, N]`, the other way round (`SWAPPED`), so that rows of `dw` are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.tile_order import load_step, num_turns, tile_index_at, wgrad_tile
from ..device.tiles import dot, expert_base, round_to, zeros
from .epilogue import add_to_descriptor, add_to_pointers
from .segments import load_rows_of, load_rows_of_step


@triton.jit
def _bias_grads(
    db_ptr,
    db_table_ptr,
    stride_db_e,
    dy_desc,
    dy_ptr,
    dy_row_ids_ptr,
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
        tile_index = tile_index_at(turn, program, programs)
        expert, n = tl.load(order_ptr + tile_index // num_n), tile_index % num_n * COLUMNS
        first = tl.load(offsets_ptr + expert)
        size = tl.load(offsets_ptr + expert + 1) - first
        acc_RN = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.range(0, size, ROWS, num_stages=3):  # without a dot, loads are pipelined on demand only
            dy_RN = load_rows_of(dy_desc, dy_ptr, dy_row_ids_ptr, first, size, start, n, N, ROWS, COLUMNS).to(
                tl.float32
            )
            if scale_ptr is not None:
                rows = start + tl.arange(0, ROWS)
                dy_RN *= tl.load(scale_ptr + first + rows, mask=rows < size, other=0.0).to(tl.float32)[:, None]
            acc_RN += dy_RN
        db, column = expert_base(db_ptr, db_table_ptr, stride_db_e, expert), n + tl.arange(0, COLUMNS)
        tl.store(db + column, round_to(tl.sum(acc_RN, axis=0), db_ptr.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["num_segments", "num_experts"])
def _grouped_wgrad_kernel(
    left_ptr,
    left_desc,
    left_row_ids_ptr,
    right_ptr,
    right_desc,
    right_row_ids_ptr,
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
    LEFT_VECTOR: tl.constexpr,  # elements of a unit of places, where rows of several segments are gathered
    RIGHT_VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,  # by Triton: loads, MMAs and the epilogue have warps of their own
    PRECISION: tl.constexpr,
):
    """`left` `[R, N]`, `right` `[R, K]`, or those of the first segment; `dw` `[E, N, K]`; `db` `[E, columns of dy]`;
    `scale` `[R]`; tables: experts' addresses, `[E]` int64. `left_row_ids`, `right_row_ids`: `[R]` integers or, with
    several segments, places of rows, `[steps, BLOCK_R]` int64.

    `offsets`, `order`: `[E + 1]` int32; `segments` `[5, S]` int64 and `steps`: see `plan_steps`. Descriptors
    (`left_desc`, ...) move the same tensors by TMA, instead of the pointers. Absent arguments are None.
    """
    BLOCK_R: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    HAS_DW: tl.constexpr = (dw_ptr is not None) or (dw_desc is not None)
    FLATTEN: tl.constexpr = dw_desc is not None
    if db_ptr is not None:
        # In loops of its own: in the GEMM's loop, all programs would move every tile of dy through registers.
        if SWAPPED:
            _bias_grads(
                *(db_ptr, db_table_ptr, stride_db_e, right_desc, right_ptr, right_row_ids_ptr, scale_ptr, offsets_ptr),
                *(order_ptr, num_experts, K, BLOCK_R, BLOCK_K),
            )
        else:
            _bias_grads(
                *(db_ptr, db_table_ptr, stride_db_e, left_desc, left_ptr, left_row_ids_ptr, scale_ptr, offsets_ptr),
                *(order_ptr, num_experts, N, BLOCK_R, BLOCK_N),
            )

    if HAS_DW:
        num_n, num_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
        # Experts without rows come last; nothing is added to their gradients.
        num_used = tl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
        # Persistent; with FLATTEN this is one loop with that over rows: see `device/tile_order.py`.
        program, programs = tl.program_id(0), tl.num_programs(0)
        turns = num_turns(num_used * num_n * num_k, program, programs)
        for turn in tl.range(0, turns, flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE):
            rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
            expert = tl.load(order_ptr + rank)
            n, k = n_tile * BLOCK_N, k_tile * BLOCK_K
            acc_NK = zeros(BLOCK_N, BLOCK_K, turns, FLATTEN)
            # An expert without rows has one step of zeros, to be written.
            if segments_ptr is None:
                first = tl.load(offsets_ptr + expert)
                size = tl.load(offsets_ptr + expert + 1) - first
                steps = tl.maximum(tl.cdiv(size, BLOCK_R), 1)
                tl.assume(steps > 0)
                for step in range(0, steps):
                    at = step * BLOCK_R
                    left_RN = load_rows_of(
                        left_desc, left_ptr, left_row_ids_ptr, first, size, at, n, N, BLOCK_R, BLOCK_N
                    )
                    right_RK = load_rows_of(
                        right_desc, right_ptr, right_row_ids_ptr, first, size, at, k, K, BLOCK_R, BLOCK_K
                    )
                    acc_NK = dot(tl.trans(left_RN), right_RK, acc_NK, PRECISION)
            else:
                first_step = tl.load(steps_ptr + expert)
                steps = tl.load(steps_ptr + expert + 1) - first_step
                tl.assume(steps > 0)
                # A step is read while the one before is multiplied: loads that give addresses are not pipelined.
                read = load_step(steps_ptr, segments_ptr, first_step, num_segments, num_experts)
                for i in range(0, steps):
                    row, rows, left, right = read
                    step = first_step + i
                    left_RN = load_rows_of_step(
                        *(left_desc, left_ptr, left_row_ids_ptr, step, left, row, rows, n, N),
                        *(BLOCK_R, BLOCK_N, LEFT_VECTOR, SEGMENTS_ALIGNED),
                    )
                    right_RK = load_rows_of_step(
                        *(right_desc, right_ptr, right_row_ids_ptr, step, right, row, rows, k, K),
                        *(BLOCK_R, BLOCK_K, RIGHT_VECTOR, SEGMENTS_ALIGNED),
                    )
                    acc_NK = dot(tl.trans(left_RN), right_RK, acc_NK, PRECISION)
                    step = first_step + tl.minimum(i + 1, steps - 1)
                    read = load_step(steps_ptr, segments_ptr, step, num_segments, num_experts)

            if dw_desc is not None:
                dw_e = num_experts - 1 - expert if REVERSED else expert
                add_to_descriptor(dw_desc, dw_e, n, k, acc_NK, ACCUMULATE, TILE.SUBTILES)
            else:
                dw = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert, DW_ALIGNED)
                add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, TILE.SUBTILES)
