"""Products of e4m3 rows and weights (recipe fp8_block) on Hopper, by one producer and two consumers of 64 rows each.

A step is one block of 128 along K, for which `x` has one scale a row, and `w` one for 128 of its rows: a part of the
tile's columns. `wgmma` keeps 13 bits of fraction of sums of 8-bit products, so each part of a step has sums of its own.
They are then promoted: multiplied by both scales and added to the accumulator in fp32. While one consumer promotes, the
other can multiply.
"""

from ..device.tiles import column_subtiles
from .gluon_compat import aggregate, fence_async_shared, gl, gluon, value, warpgroup_mma, warpgroup_mma_wait
from .ring import make_ring, shared_tiles
from .rows import rows_operand, weights_operand
from .scaled_rows import CHUNK, scale_stages, scaled_rows
from .sm_90 import ROWS

CONSUMERS = gl.constexpr(2)


@gluon.jit
def zeros():
    """Accumulator of a part before its first step, `[ROWS, CHUNK]`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, CHUNK, 32])
    return gl.zeros((ROWS, CHUNK), gl.float32, layout)


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


class Parts:
    """Finished accumulators of two parts: nothing runs after `multiply`."""

    @gluon.jit
    def finish(self, parts, i):
        """Return both parts."""
        return parts

    @gluon.jit
    def subtile(self, parts, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S (neighbouring columns) of both parts together."""
        EACH: gl.constexpr = NUM_SUBTILES // 2
        return column_subtiles(parts[S // EACH], EACH)[S % EACH]


@aggregate
class Accumulators(Parts):
    """Products of rows and weights. Parts are neighbouring columns or, of two HALVES, which N / 2 divides into whole
    blocks, the same columns of each. `w_scales`: `[E, ceil(N / CHUNK), ceil(K / CHUNK)]`.
    """

    x: value  # stages
    w: value
    scales: value
    ring: value
    w_scales_ptr: value
    N: value
    HALVES: gl.constexpr

    @gluon.jit
    def multiply(self, turn, i, tile, steps, CONSUMER: gl.constexpr):
        """`((left, right), next i)`: both parts of `x @ w^T` for a consumer's rows of a tile. i counts steps."""
        num_blocks = gl.cdiv(self.N, CHUNK)
        left, right = zeros(), zeros()
        if self.HALVES == 2:
            left_ptr = self.w_scales_ptr + (tile.expert * num_blocks + tile.n).to(gl.int64) * steps
            right_ptr = left_ptr + num_blocks // 2 * steps
        else:
            left_ptr = self.w_scales_ptr + (tile.expert * num_blocks + 2 * tile.n).to(gl.int64) * steps
            # Past the last column there is no block: any scale will do.
            right_ptr = left_ptr + gl.where(2 * tile.n + 1 < num_blocks, steps, 0)
        for step in range(0, steps):
            left_scale, right_scale = gl.load(left_ptr + step), gl.load(right_ptr + step)
            stage = self.ring.wait(i)
            x_MK, w_NK = self.x.index(stage * CONSUMERS + CONSUMER), self.w.index(stage)
            by_row = self.scales.index(stage).slice(CONSUMER * ROWS, ROWS)
            by_row_M = by_row.load(gl.SliceLayout(1, left.type.layout))
            left = promote(left, multiply_step(x_MK, w_NK.slice(0, CHUNK)), by_row_M, left_scale)
            # Passes at once. ptxas moves nothing past this loop: it would else begin the next MMA before it has
            # promoted the sums above, and need registers for both.
            self.ring.wait(i)
            sums = multiply_step(x_MK, w_NK.slice(CHUNK, CHUNK))
            self.ring.release(stage)
            right = promote(right, sums, by_row_M, right_scale)
            i += 1
        return (left, right), i


@gluon.jit
def ragged_operands(x, w_desc, w_scales_ptr, N, HALVES: gl.constexpr, TILE: gl.constexpr):
    """`(left, right, ring, accumulators)` of an M-ragged pass; `x`: descriptors of elements and of scales."""
    gl.static_assert(TILE.BLOCK_M == CONSUMERS * ROWS)
    gl.static_assert((TILE.BLOCK_N == 2 * CHUNK) and (TILE.BLOCK_K == CHUNK))
    STAGES: gl.constexpr = TILE.num_stages
    x_stages = shared_tiles(x[0].dtype, STAGES * CONSUMERS, ROWS, CHUNK)
    w_stages = shared_tiles(w_desc.dtype, STAGES, TILE.BLOCK_N, CHUNK)
    scales = scale_stages(gl.float32, STAGES, TILE.BLOCK_M)
    ring = make_ring(STAGES, CONSUMERS)
    fence_async_shared()
    left = scaled_rows(rows_operand(x[0], (None, None, None, None), x_stages, 0, CONSUMERS, False), x[1], scales)
    right = weights_operand(w_desc, 0, w_stages, False, True, HALVES)
    return left, right, ring, Accumulators(x_stages, w_stages, scales, ring, w_scales_ptr, N, HALVES)
