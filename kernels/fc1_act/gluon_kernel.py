"""Pass (1), warp-specialized, for long loads on Hopper and Blackwell: the same tiles in the same order as
`triton_kernel.py`.

One warp loads (TMA, `warp_specialized/ring.py`; four where rows are gathered), others multiply both channels of a
tile's columns (`warp_specialized/partitions.py`). While `h` and `a` are stored, the next tile's operands arrive, and
MMAs go on: those of the other warpgroup on Hopper, into the other accumulator on Blackwell. No barrier covers the whole
block. The halves of `h`, and then `a`, are stored from buffers in turn: each consumer has HALVES + 1.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device import activation
from ..device.tile_order import load_tile, tile_at, zero_padding_at
from ..device.tiles import expert_base
from ..warp_specialized.blackwell import multiply_tiles
from ..warp_specialized.gluon_compat import gl, gluon, tma_store, tma_store_wait
from ..warp_specialized.partitions import (
    finished,
    load_operands,
    operands,
    product,
    subtile,
    worker_registers,
    worker_warps,
)
from ..warp_specialized.ring import column_numbers, load_for_rows, overwrite, shared_tiles, whole_rows
from .epilogue import activate, pre_activation


@gluon.jit
def _consume(
    arguments,
    pipeline,
    h_out,
    a_out,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ACT: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of a consumer; `h_out`, `a_out`: its buffers for stores."""
    bias_ptr, bias_table_ptr, stride_bias_e, probs_ptr, h_desc, a_desc, tiles_ptr, H, F = arguments
    SUBTILES: gl.constexpr = TILE.SUBTILES
    HALVES: gl.constexpr = activation.halves(ACT)
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    WIDTH: gl.constexpr = TILE.BLOCK_N // SUBTILES
    NUM_SUBTILES: gl.constexpr = HALVES * SUBTILES
    num_m, num_f = pipeline[0], pipeline[1]
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_f, gl.num_programs(0)):
        acc, i = product(i, H, pipeline, CONSUMER, K_CONTIGUOUS, TILE)
        m_tile, f_tile = tile_at(tile_index, num_m, num_f, TILE.GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, CONSUMER * ROWS)
        subtiles = finished(acc, i, pipeline, NUM_SUBTILES, TILE)
        for s in gl.static_range(SUBTILES):
            column = f_tile * TILE.BLOCK_N + s * WIDTH
            h_MG = subtile(subtiles, s, NUM_SUBTILES, CONSUMERS)
            l_MF = subtile(subtiles, SUBTILES + s, NUM_SUBTILES, CONSUMERS) if HALVES == 2 else h_MG
            bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, expert) if bias_ptr is not None else None
            column_1G = column_numbers(h_MG, column * ACT.CHANNEL_STEP)
            h_MG, l_MF = pre_activation(h_MG, l_MF, bias, column_1G, F * ACT.CHANNEL_STEP, ACT, h_out.dtype)
            buffer = h_out.index(CONSUMER * HALVES)
            overwrite(buffer, h_MG, HALVES)
            if HALVES == 2:
                tma_store(h_desc, [wrap, end, row, 0, column], buffer)
                overwrite(h_out.index(CONSUMER * HALVES + 1), l_MF, HALVES)
                tma_store(h_desc, [wrap, end, row, 1, column], h_out.index(CONSUMER * HALVES + 1))
            else:
                tma_store(h_desc, [wrap, end, row, column * ACT.CHANNEL_STEP], buffer)
            a = activate(h_MG, l_MF, ACT)
            if probs_ptr is not None:
                a *= load_for_rows(probs_ptr + first, a, CONSUMER * ROWS, rows)
            overwrite(a_out.index(CONSUMER), a.to(a_out.dtype), HALVES)
            tma_store(a_desc, [wrap, end, row, column], a_out.index(CONSUMER))
    tma_store_wait(0)


@gluon.jit
def grouped_fc1_act_warp_specialized_kernel(
    x_desc,
    row_ids_ptr,
    w_desc,
    bias_ptr,
    bias_table_ptr,
    probs_ptr,
    h_ptr,
    h_desc,
    a_ptr,
    a_desc,
    tiles_ptr,
    num_experts,
    H,
    F,
    stride_bias_e,
    stride_h_r,
    stride_a_r,
    ACT: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Pass (1); arguments as in the Triton kernel."""
    gl.static_assert(TILE.BLOCK_M == 128)
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    HALVES: gl.constexpr = activation.halves(ACT)
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    COLUMNS: gl.constexpr = HALVES * TILE.BLOCK_N * ACT.CHANNEL_STEP
    x, w, full, empty, accumulators = operands(x_desc.dtype, CONSUMERS, COLUMNS, K_CONTIGUOUS, TILE)
    pipeline = (gl.load(tiles_ptr), gl.cdiv(F, TILE.BLOCK_N), x, w, full, empty, accumulators)
    h_out = shared_tiles(h_desc.dtype, CONSUMERS * HALVES, ROWS, WIDTH * ACT.CHANNEL_STEP)
    a_out = shared_tiles(a_desc.dtype, CONSUMERS, ROWS, WIDTH)
    GATHERED: gl.constexpr = row_ids_ptr is not None
    arguments = (bias_ptr, bias_table_ptr, stride_bias_e, probs_ptr, h_desc, a_desc, tiles_ptr, H, F)
    loads = (x_desc, row_ids_ptr, w_desc, tiles_ptr, num_experts)
    gl.warp_specialize(
        [
            (_consume, (arguments, pipeline, h_out, a_out, gl.constexpr(0), CONSUMERS, ACT, K_CONTIGUOUS, TILE)),
            (_consume, (arguments, pipeline, h_out, a_out, gl.constexpr(1), CONSUMERS, ACT, K_CONTIGUOUS, TILE))
            if CONSUMERS == 2
            else (multiply_tiles, (H, pipeline, K_CONTIGUOUS, TILE)),
            (load_operands, (loads, H, pipeline, REVERSED, K_CONTIGUOUS, HALVES, TILE)),
        ],
        worker_warps(CONSUMERS, GATHERED),
        worker_registers(CONSUMERS, GATHERED),
    )
    row_M1, column_1N = whole_rows(TILE.BLOCK_M)
    zero_padding_at(h_ptr, tiles_ptr, 2 * F if ACT.GATED else F, stride_h_r, 1, row_M1, column_1N)
    zero_padding_at(a_ptr, tiles_ptr, F, stride_a_r, 1, row_M1, column_1N)
