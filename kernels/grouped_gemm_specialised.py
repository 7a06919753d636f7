"""Passes (2) and (4) with a task for each warp, for Hopper: tiles and order of `grouped_gemm.py`, long loads.

One warp loads (TMA, `ring.py`); two warpgroups multiply, each 64 of a tile's rows by all its columns, and store them
while the other still multiplies and the next tile's operands arrive: no barrier of the whole block.
"""

from triton.tools.ragged_tma import to_ragged_indices

from .common import column_subtiles, expert_base, load_bias_at
from .dprobs import sum_partials_at
from .gluon import gl, gluon, tma_store, tma_store_wait
from .ring import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    load_operands,
    operands,
    overwrite,
    places,
    product,
    shared_tiles,
    whole_rows,
)
from .schedule import load_tile, tile_at, zero_padding_at


@gluon.jit
def _multiply_and_store(
    bias_ptr,
    bias_table_ptr,
    stride_bias_e,
    scale_ptr,
    y_desc,
    tiles_ptr,
    N,
    K,
    loop,
    out,
    WHICH: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SUBTILES: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    WIDTH: gl.constexpr = BLOCK_N // SUBTILES
    num_m, num_n = loop[0], loop[1]
    i = 0
    for place in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(place, num_m, num_n, GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, WHICH * ROWS)
        acc, i = product(i, K, loop, WHICH, BLOCK_N, BLOCK_K, K_CONTIGUOUS, STAGES)
        parts = column_subtiles(acc, SUBTILES)
        for s in gl.static_range(SUBTILES):
            y_MN, column = parts[s], n_tile * BLOCK_N + s * WIDTH
            if bias_ptr is not None:
                row_M1, column_1N = places(y_MN, WHICH * ROWS, column)
                bias_1N = load_bias_at(expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert), column_1N, N)
                if scale_ptr is not None:
                    scale_M1 = gl.load(scale_ptr + first + row_M1, mask=row_M1 < rows, other=0.0).to(gl.float32)
                    bias_1N = bias_1N * scale_M1
                y_MN += bias_1N
            buffer = out.index(WHICH * SUBTILES + s)
            overwrite(buffer, y_MN.to(out.dtype), SUBTILES - 1)
            tma_store(y_desc, [wrap, end, row, column], buffer)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_partials", "num_rows"])
def grouped_gemm_specialised_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    bias_table_ptr,
    scale_ptr,
    y_ptr,
    y_desc,
    partial_ptr,
    rows_ptr,
    dprobs_ptr,
    tiles_ptr,
    num_partials,
    num_rows,
    num_experts,
    N,
    K,
    stride_bias_e,
    stride_y_r,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SUBTILES: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Passes (2) and (4); arguments as of the Triton kernel."""
    gl.static_assert(BLOCK_M == CONSUMERS * ROWS)
    x, w, full, empty = operands(x_desc.dtype, BLOCK_N, BLOCK_K, K_CONTIGUOUS, STAGES)
    loop = (gl.load(tiles_ptr), gl.cdiv(N, BLOCK_N), x, w, full, empty)
    out = shared_tiles(y_desc.dtype, CONSUMERS * SUBTILES, ROWS, BLOCK_N // SUBTILES)
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply_and_store, (
                bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr, y_desc, tiles_ptr, N, K, loop, out, gl.constexpr(0),
                K_CONTIGUOUS, BLOCK_N, BLOCK_K, SUBTILES, GROUP_M, STAGES,
            )),
            (_multiply_and_store, (
                bias_ptr, bias_table_ptr, stride_bias_e, scale_ptr, y_desc, tiles_ptr, N, K, loop, out, gl.constexpr(1),
                K_CONTIGUOUS, BLOCK_N, BLOCK_K, SUBTILES, GROUP_M, STAGES,
            )),
            (load_operands, (
                x_desc, w_desc, tiles_ptr, num_experts, K, loop,
                REVERSED, K_CONTIGUOUS, 1, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on
    row_M1, column_1N = whole_rows(BLOCK_M)
    zero_padding_at(y_ptr, tiles_ptr, N, stride_y_r, 1, row_M1, column_1N)
    if partial_ptr is not None:
        numbers = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
        sum_partials_at(partial_ptr, rows_ptr, dprobs_ptr, num_partials, num_rows, numbers)
