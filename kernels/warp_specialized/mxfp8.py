"""Products of e4m3 operands with a scale for 32 elements along what is contracted (recipe mxfp8), on Blackwell.

Warps share the work as in `blackwell.py`. A step is 128 elements along what is contracted, of 128 rows of the left
operand and of a tile's columns of the right one. TMA loads their scales with them: 512 bytes for 128 rows or columns,
in the order that `tcgen05.cp` takes. The warp that multiplies copies these to tensor memory, where `tcgen05.mma` needs
them. There is one set of scales, and nothing waits for a copy: PTX orders a copy before the MMAs that the same thread
issues later. That it also orders MMAs before a later copy is an assumption: PTX does not list that pair. A tutorial of
Triton's says so (`python/tutorials/gluon/06-tcgen05.py`), and CUTLASS relies on it
(`sm100_blockscaled_mma_array_warpspecialized.hpp`).

An accumulator of 256 columns leaves no room in tensor memory for a second one beside the scales.

Stages of M-ragged passes are `[rows, 128]` and `[columns, 128]`. In wgrad operands are `MN_MAJOR`: `[128, rows]` and
`[128, columns]`.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at
from .blackwell import ROWS, tile_accumulators, wait_until_free
from .gluon_compat import (
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    fence_async_shared,
    gl,
    gluon,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
    tma_load,
)
from .ring import begin_loads, mbarriers, shared_tiles, wait_for_operands

CHUNK = gl.constexpr(128)  # elements of a step; rows or columns that share 512 bytes of scales
LINES = gl.constexpr(2)  # of 256 bytes, the longest that TMA moves, in 512 bytes of scales


@gluon.jit
def _scale_stages(STAGES: gl.constexpr, SIZE: gl.constexpr):
    """Scales of SIZE rows or columns, as TMA loads them: stages in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2)
    return gl.allocate_shared_memory(gl.uint8, [STAGES, SIZE // CHUNK * LINES, 256], layout)


@gluon.jit
def _by_row(scales):
    """Scales of a stage as MMAs take them: one for each row or column and 32 elements."""
    CHUNKS: gl.constexpr = scales.shape[0] // LINES
    return scales.reshape((CHUNKS, 32, 4, 4)).permute((0, 2, 1, 3)).reshape((CHUNKS * CHUNK, 4))


@gluon.jit
def operands(DTYPE: gl.constexpr, COLUMNS: gl.constexpr, MN_MAJOR: gl.constexpr, STAGES: gl.constexpr):
    """`(left, right, left scales, right scales, full, empty, accumulators)`: stages in shared memory, of COLUMNS
    columns of the right operand; mbarriers; accumulators in tensor memory.
    """
    left = shared_tiles(DTYPE, STAGES, ROWS, CHUNK)
    right = shared_tiles(DTYPE, STAGES, CHUNK if MN_MAJOR else COLUMNS, COLUMNS if MN_MAJOR else CHUNK)
    left_scales, right_scales = _scale_stages(STAGES, ROWS), _scale_stages(STAGES, COLUMNS)
    full, empty = mbarriers(STAGES, 1), mbarriers(STAGES, 1)
    accumulators = tile_accumulators(COLUMNS, 1)
    fence_async_shared()
    return left, right, left_scales, right_scales, full, empty, accumulators


@gluon.jit
def scales_in_tensor_memory(COLUMNS: gl.constexpr):
    """Memory for the scales of a step, of the right and of the left operand."""
    layout: gl.constexpr = TensorMemoryScalesLayout()
    # In this order: Triton 3.6 writes the second chunk of a copy to the wrong place if others are allocated before.
    right = allocate_tensor_memory(gl.uint8, [COLUMNS, 4], layout)
    return right, allocate_tensor_memory(gl.uint8, [ROWS, 4], layout)


@gluon.jit
def multiply_tile(j, i, steps, operands, scales, MN_MAJOR: gl.constexpr, STAGES: gl.constexpr):
    """Multiply tile j of this program, its steps from step i on, and return the next tile's first step.

    Called by the warp that multiplies, with the results of `operands` and of `scales_in_tensor_memory`.
    """
    left, right, left_stages, right_stages, full, empty, accumulators = operands
    acc, done, _ = accumulators
    right_scales, left_scales = scales
    at = wait_until_free(j, accumulators)
    for step in range(0, steps):
        stage = wait_for_operands(i, full, STAGES)
        a, b = left.index(stage), right.index(stage)
        if MN_MAJOR:
            a = a.permute((1, 0))
        else:
            b = b.permute((1, 0))
        tcgen05_copy(_by_row(left_stages.index(stage)), left_scales)
        tcgen05_copy(_by_row(right_stages.index(stage)), right_scales)
        tcgen05_mma_scaled(
            a,
            b,
            acc.index(at),
            left_scales,
            right_scales,
            "e4m3",
            "e4m3",
            use_acc=step > 0,
            mbarriers=[empty.index(stage)],
        )
        i += 1
    tcgen05_commit(done.index(at))
    return i


@gluon.jit
def load_operands(arguments, N, K, num_m, num_n, operands, TILE: gl.constexpr, HALVES: gl.constexpr = 1):
    """Partition of the producer in an M-ragged pass: for each step, load rows of `x`, columns of `w` or as many of each
    half of `w`, and the scales of both.
    """
    x_desc, x_scales_desc, w_desc, w_scales_desc, tiles_ptr = arguments
    x, w, x_scales, w_scales, full, empty, _accumulators = operands
    CHUNKS: gl.constexpr = TILE.BLOCK_N // CHUNK
    BYTES: gl.constexpr = (ROWS + TILE.BLOCK_N) * CHUNK + 512 * (1 + CHUNKS)
    num_steps, num_chunks = gl.cdiv(K, CHUNK), gl.cdiv(N, CHUNK)
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, 0)
        for step in range(0, num_steps):
            stage = begin_loads(i, full, empty, BYTES, TILE.num_stages)
            i += 1
            arrived = full.index(stage)
            tma_load(x_desc, [wrap, end, row, step * CHUNK], arrived, x.index(stage))
            if HALVES == 2:
                n = n_tile * (TILE.BLOCK_N // 2)
                tma_load(w_desc, [expert, 0, n, step * CHUNK], arrived, w.index(stage))
            else:
                tma_load(w_desc, [expert, n_tile * TILE.BLOCK_N, step * CHUNK], arrived, w.index(stage))
            tma_load(x_scales_desc, [(m_tile * num_steps + step) * LINES, 0], arrived, x_scales.index(stage))
            if HALVES == 2:
                line = n_tile * (CHUNKS // 2 * LINES)
                tma_load(w_scales_desc, [expert * num_steps + step, 0, line, 0], arrived, w_scales.index(stage))
            else:
                # Past the last column, scales of the next step or expert: columns that are not stored.
                chunk = (expert * num_steps + step) * num_chunks + n_tile * CHUNKS
                tma_load(w_scales_desc, [chunk * LINES, 0], arrived, w_scales.index(stage))


@gluon.jit
def multiply_tiles(K, num_m, num_n, operands, scales, TILE: gl.constexpr):
    """Partition of the warp that multiplies in an M-ragged pass; `K > 0`."""
    i = 0
    for j in range(0, gl.cdiv(num_m * num_n - gl.program_id(0), gl.num_programs(0))):
        i = multiply_tile(j, i, gl.cdiv(K, CHUNK), operands, scales, False, TILE.num_stages)
