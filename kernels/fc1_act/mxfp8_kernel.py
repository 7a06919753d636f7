"""Pass (1) of 8-bit operands (recipe mxfp8) on Blackwell, warp-specialized, which also quantizes the activation: the
partitions of the pass gemm (`warp_specialized/mxfp8.py`) with an epilogue of its own.

A thread of the consumer reads 32 neighbouring columns of the activation in one row, which are a block: the columns of
`h` that they come from are in its registers, also where gates and linear channels alternate.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device import activation
from ..device.quantization import along_columns, chunk_of_scales, exponent_of_zeros, store_scales
from ..device.tile_order import load_tile, tile_at, zero_padding_at
from ..device.tiles import expert_base, round_to, to_fp32
from ..warp_specialized.blackwell import ROWS, read_subtiles, wait_for_accumulator
from ..warp_specialized.gluon_compat import gl, gluon, tma_store, tma_store_wait
from ..warp_specialized.mxfp8 import CHUNK, load_operands, multiply_tiles, operands, scales_in_tensor_memory
from ..warp_specialized.partitions import worker_registers, worker_warps
from ..warp_specialized.ring import column_numbers, load_for_rows, overwrite, row_numbers, shared_tiles, whole_rows
from .epilogue import activate, pre_activation


@gluon.jit
def _store_activation(a_MF, outputs, m_tile, tile, place, column, buffer, DTYPE: gl.constexpr, RUNNING: gl.constexpr):
    """Multiply columns of the activation by `probs`, round them as `h`, quantize and store them with their scales.

    A bias makes values of rows past the expert's end, which are not stored. Their scales are those of zeros.
    """
    probs_ptr, a_desc, a_scales_ptr, F = outputs
    _, first, rows = tile
    wrap, end, row = place
    if probs_ptr is not None:
        a_MF *= load_for_rows(probs_ptr + first, a_MF, 0, rows)
    copy, exponent = along_columns(to_fp32(round_to(a_MF, DTYPE)), "mxfp8")
    overwrite(buffer, copy, RUNNING)
    tma_store(a_desc, [wrap, end, row, column], buffer)
    if column < gl.cdiv(F, CHUNK) * CHUNK:
        row_M1 = row_numbers(exponent, 0)[:, None]
        exponent = gl.where(row_M1 < rows, exponent, exponent_of_zeros("mxfp8"))
        block_1B = column_numbers(exponent, column % CHUNK // 32)
        store_scales(chunk_of_scales(a_scales_ptr, m_tile, column, F), exponent, row_M1, block_1B, "mxfp8")


@gluon.jit
def _consume(arguments, outputs, num_m, num_n, accumulators, h_out, a_out, ACT: gl.constexpr, TILE: gl.constexpr):
    """Partition of the consumer; `h_out`, `a_out`: its buffers for stores."""
    bias_ptr, bias_table_ptr, stride_bias_e, h_desc, tiles_ptr = arguments
    HALVES: gl.constexpr = activation.halves(ACT)
    STEP: gl.constexpr = ACT.CHANNEL_STEP
    NUM_SUBTILES: gl.constexpr = TILE.SUBTILES // STEP
    OF_HALF: gl.constexpr = NUM_SUBTILES // HALVES
    num_gates = outputs[3] * STEP
    for j in range(0, gl.cdiv(num_m * num_n - gl.program_id(0), gl.num_programs(0))):
        m_tile, n_tile = tile_at(gl.program_id(0) + j * gl.num_programs(0), num_m, num_n, TILE.GROUP_M)
        tile = load_tile(tiles_ptr, m_tile)
        place = to_ragged_indices(tile[1], tile[2], 0)
        wrap, end, row = place
        bias = expert_base(bias_ptr, bias_table_ptr, stride_bias_e, tile[0]) if bias_ptr is not None else None
        subtiles = read_subtiles(wait_for_accumulator(j, accumulators), 0, NUM_SUBTILES)
        for s in gl.static_range(OF_HALF):
            h_MG, l_MF = subtiles[s], subtiles[(HALVES - 1) * OF_HALF + s]
            column = n_tile * (TILE.BLOCK_N // HALVES) + s * h_out.shape[2]
            h_MG, l_MF = pre_activation(h_MG, l_MF, bias, column_numbers(h_MG, column), num_gates, ACT, h_out.dtype)
            overwrite(h_out.index(0), h_MG, HALVES)
            if HALVES == 2:
                tma_store(h_desc, [wrap, end, row, 0, column], h_out.index(0))
                overwrite(h_out.index(1), l_MF, HALVES)
                tma_store(h_desc, [wrap, end, row, 1, column], h_out.index(1))
            else:
                tma_store(h_desc, [wrap, end, row, column], h_out.index(0))
            a_MF = activate(h_MG, l_MF, ACT)
            buffer = a_out.index(0)
            _store_activation(a_MF, outputs, m_tile, tile, place, column // STEP, buffer, h_out.dtype, HALVES)
    tma_store_wait(0)


@gluon.jit
def grouped_fc1_act_mxfp8_kernel(
    x_desc,
    x_scales_desc,
    w_desc,
    w_scales_desc,
    bias_ptr,
    bias_table_ptr,
    probs_ptr,
    h_ptr,
    h_desc,
    a_desc,
    a_scales_ptr,
    tiles_ptr,
    H,
    F,
    stride_bias_e,
    stride_h_r,
    ACT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`x` `[R, H]` and `w` `[E, G, H]` e4m3, with scales as in the pass gemm; `bias` `[E, G]`; `probs` `[R]`; `h` `[R,
    G]`; `a` and its scales: a row copy of act * probs, `[R, F]`, with F a multiple of 32, or of 128 if rows of `h` have
    two halves.
    """
    gl.static_assert(CONSUMERS == 1)
    gl.static_assert(TILE.BLOCK_M == ROWS)
    gl.static_assert(TILE.BLOCK_K == CHUNK)
    HALVES: gl.constexpr = activation.halves(ACT)
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    G = HALVES * F * ACT.CHANNEL_STEP
    num_m, num_n = gl.load(tiles_ptr), gl.cdiv(G, TILE.BLOCK_N)
    staged = operands(x_desc.dtype, TILE.BLOCK_N, False, TILE.num_stages)
    scales = scales_in_tensor_memory(TILE.BLOCK_N)
    h_out = shared_tiles(h_desc.dtype, HALVES, ROWS, WIDTH * ACT.CHANNEL_STEP)
    a_out = shared_tiles(a_desc.dtype, 1, ROWS, WIDTH)
    arguments = (bias_ptr, bias_table_ptr, stride_bias_e, h_desc, tiles_ptr)
    outputs = (probs_ptr, a_desc, a_scales_ptr, F)
    loads = (x_desc, x_scales_desc, w_desc, w_scales_desc, tiles_ptr)
    gl.warp_specialize(
        [
            (_consume, (arguments, outputs, num_m, num_n, staged[6], h_out, a_out, ACT, TILE)),
            (multiply_tiles, (H, num_m, num_n, staged, scales, TILE)),
            (load_operands, (loads, G, H, num_m, num_n, staged, TILE, HALVES)),
        ],
        worker_warps(CONSUMERS),
        worker_registers(CONSUMERS),
    )
    row_M1, column_1N = whole_rows(ROWS)
    zero_padding_at(h_ptr, tiles_ptr, G, stride_h_r, 1, row_M1, column_1N)
