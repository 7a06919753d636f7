"""Products of e4m3 rows and weights (recipe fp8_block) on Hopper, by one producer and two consumers of 64 rows each.

A step is one block of 128 along K, for which `x` has one scale a row, and `w` one for 128 of its rows: a part of the
tile's columns. `wgmma` keeps 13 bits of fraction of sums of 8-bit products, so each part of a step has sums of its own.
They are then promoted: multiplied by both scales and added to the accumulator in fp32. While one consumer promotes, the
other can multiply.

`pipeline` is `(num_m, num_n, x, w, scales, full, empty)`: numbers of row tiles and of column tiles, then the result of
`operands`.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_tile, tile_at
from .gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper import ROWS
from .ring import begin_loads, mbarriers, shared_tiles, wait_for_operands

CONSUMERS = gl.constexpr(2)
BLOCK = gl.constexpr(128)  # elements of a block, which are a step, and columns of a part


@gluon.jit
def scale_stages(COUNT: gl.constexpr):
    """`[COUNT, BLOCK]` scales in shared memory, as TMA loads them."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.allocate_shared_memory(gl.float32, [COUNT, BLOCK], layout)


@gluon.jit
def operands(DTYPE: gl.constexpr, TILE: gl.constexpr):
    """`(x, w, scales, full, empty)`: stages in shared memory of each consumer's rows of `x`, of a tile's columns of `w`
    and of the scales of the rows; mbarriers.
    """
    gl.static_assert(TILE.BLOCK_M == CONSUMERS * ROWS)
    gl.static_assert((TILE.BLOCK_N == 2 * BLOCK) and (TILE.BLOCK_K == BLOCK))
    STAGES: gl.constexpr = TILE.num_stages
    x = shared_tiles(DTYPE, STAGES * CONSUMERS, ROWS, BLOCK)
    w = shared_tiles(DTYPE, STAGES, TILE.BLOCK_N, BLOCK)
    scales = scale_stages(STAGES)
    full, empty = mbarriers(STAGES, 1), mbarriers(STAGES, CONSUMERS)
    fence_async_shared()
    return x, w, scales, full, empty


@gluon.jit
def load_operands(arguments, K, pipeline, TILE: gl.constexpr, HALVES: gl.constexpr = 1):
    """Partition of the producer: for each step, load rows of `x` with their scales, and columns of `w`, or as many of
    each half of `w`.
    """
    x_desc, x_scales_desc, w_desc, tiles_ptr = arguments
    num_m, num_n, x, w, scales, full, empty = pipeline
    BYTES: gl.constexpr = (TILE.BLOCK_M + TILE.BLOCK_N) * BLOCK + 4 * TILE.BLOCK_M
    num_steps = gl.cdiv(K, BLOCK)
    i = 0
    for tile_index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m_tile, n_tile = tile_at(tile_index, num_m, num_n, TILE.GROUP_M)
        expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, 0)
        n = n_tile * (TILE.BLOCK_N // HALVES)
        for step in range(0, num_steps):
            stage = begin_loads(i, full, empty, BYTES, TILE.num_stages)
            i += 1
            arrived = full.index(stage)
            for c in gl.static_range(CONSUMERS):
                tma_load(x_desc, [wrap, end, row + c * ROWS, step * BLOCK], arrived, x.index(stage * CONSUMERS + c))
            if HALVES == 2:
                tma_load(w_desc, [expert, 0, n, step * BLOCK], arrived, w.index(stage))
            else:
                tma_load(w_desc, [expert, n, step * BLOCK], arrived, w.index(stage))
            tma_load(x_scales_desc, [(m_tile * num_steps + step) * TILE.BLOCK_M], arrived, scales.index(stage))


@gluon.jit
def zeros():
    """Accumulator of a part before its first step, `[ROWS, BLOCK]`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    return gl.zeros((ROWS, BLOCK), gl.float32, layout)


@gluon.jit
def multiply_step(x_MK, w_NK):
    """`x @ w^T` of a part and a step, finished. The first `wgmma` ignores the zeros."""
    sums = warpgroup_mma(x_MK, w_NK.permute((1, 0)), zeros(), use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def promote(acc, sums, scale_M, scale_N):
    """`acc + sums * scale_M * scale_N`, of rows and of columns or, instead of `scale_N`, of all columns (a scalar).

    The assembly is volatile: LLVM would else move it past the next MMA, and keep the sums of all parts of a step in
    registers.
    """
    layout: gl.constexpr = acc.type.layout
    if scale_N.type.is_block():
        scale_MN = gl.convert_layout(scale_M[:, None].broadcast_to(acc.shape), layout, assert_trivial=True)
        other_MN = gl.convert_layout(scale_N[None, :].broadcast_to(acc.shape), layout, assert_trivial=True)
        acc = gl.inline_asm_elementwise(
            "{ .reg .f32 scale; mul.rn.f32 scale, $2, $3; fma.rn.f32 $0, $1, scale, $4; }",
            "=f,f,f,f,f",
            [sums, scale_MN, other_MN, acc],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        scale_M = scale_M * scale_N
        scale_MN = gl.convert_layout(scale_M[:, None].broadcast_to(acc.shape), layout, assert_trivial=True)
        acc = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [sums, scale_MN, acc], dtype=gl.float32, is_pure=False, pack=1
        )
    return acc


@gluon.jit
def product(
    i,
    expert,
    n_tile,
    N,
    K,
    w_scales_ptr,
    pipeline,
    CONSUMER: gl.constexpr,
    TILE: gl.constexpr,
    HALVES: gl.constexpr = 1,
):
    """`((left, right), next i)`: both parts of `x @ w^T` for a consumer's rows of a tile. i counts steps.

    Parts are neighbouring columns or, of two halves, which N / 2 divides into whole blocks, the same columns of each.
    `w_scales`: `[E, ceil(N / BLOCK), ceil(K / BLOCK)]`.
    """
    _, _, x, w, scales, full, empty = pipeline
    STAGES: gl.constexpr = TILE.num_stages
    num_steps, num_blocks = gl.cdiv(K, BLOCK), gl.cdiv(N, BLOCK)
    left, right = zeros(), zeros()
    if HALVES == 2:
        left_ptr = w_scales_ptr + (expert * num_blocks + n_tile).to(gl.int64) * num_steps
        right_ptr = left_ptr + num_blocks // 2 * num_steps
    else:
        left_ptr = w_scales_ptr + (expert * num_blocks + 2 * n_tile).to(gl.int64) * num_steps
        # Past the last column there is no block: any scale will do.
        right_ptr = left_ptr + gl.where(2 * n_tile + 1 < num_blocks, num_steps, 0)
    for step in range(0, num_steps):
        left_scale, right_scale = gl.load(left_ptr + step), gl.load(right_ptr + step)
        stage = wait_for_operands(i, full, STAGES)
        x_MK, w_NK = x.index(stage * CONSUMERS + CONSUMER), w.index(stage)
        by_row_M = scales.index(stage).slice(CONSUMER * ROWS, ROWS).load(gl.SliceLayout(1, left.type.layout))
        left = promote(left, multiply_step(x_MK, w_NK.slice(0, BLOCK)), by_row_M, left_scale)
        # Passes at once. ptxas moves nothing past this loop: it would else begin the next MMA before it has promoted
        # the sums above, and need registers for both.
        wait_for_operands(i, full, STAGES)
        sums = multiply_step(x_MK, w_NK.slice(BLOCK, BLOCK))
        mbarrier.arrive(empty.index(stage), count=1)
        right = promote(right, sums, by_row_M, right_scale)
        i += 1
    return (left, right), i
