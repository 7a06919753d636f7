"""Products of e4m3 operands (recipe fp8_block) on Hopper, by one producer and two consumers of 64 rows each.

A step is a block of 128 of what is contracted, for which each row of the left operand has one scale. `wgmma` keeps 13
bits of fraction of sums of 8-bit products, so each of two parts of a tile's columns has sums of its own in a step. They
are then promoted: multiplied by both scales and added to the accumulator in fp32. While one consumer promotes, the
other can multiply.
"""

from ..device.tiles import column_subtiles
from .gluon_compat import aggregate, gl, gluon, value, warpgroup_mma, warpgroup_mma_wait
from .scaled_rows import CHUNK
from .sm_90 import ROWS

CONSUMERS = gl.constexpr(2)


@gluon.jit
def _zeros():
    """Accumulator of a part before its first step, `[ROWS, CHUNK]`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, CHUNK, 32])
    return gl.zeros((ROWS, CHUNK), gl.float32, layout)


@gluon.jit
def _multiply_step(a_MR, b_NR):
    """`a @ b^T` of a part and a step, finished. The first `wgmma` ignores the zeros."""
    sums = warpgroup_mma(a_MR, b_NR.permute((1, 0)), _zeros(), use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _promote(acc, sums, scale_M, scale_N):
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


@aggregate
class Accumulators:
    """Products of two operands, in two parts: neighbouring columns or, of weights in two HALVES, which N / 2 divides
    into whole blocks, the same columns of each. Nothing runs after `multiply`.

    Scales of the right operand are one for each column (BY_COLUMN), in stages, or those of weights, one for CHUNK
    columns, in memory: `[E, ceil(N / CHUNK), ceil(K / CHUNK)]`.
    """

    left: value  # stages
    right: value
    left_scales: value  # stages
    right_scales: value
    ring: value
    N: value
    HALVES: gl.constexpr
    BY_COLUMN: gl.constexpr

    @gluon.jit
    def _of_weights(self, tile, steps):
        """Addresses of the scales of both parts of a tile, one for each step."""
        num_blocks = gl.cdiv(self.N, CHUNK)
        if self.HALVES == 2:
            low_ptr = self.right_scales + (tile.expert * num_blocks + tile.n).to(gl.int64) * steps
            high_ptr = low_ptr + num_blocks // 2 * steps
        else:
            low_ptr = self.right_scales + (tile.expert * num_blocks + 2 * tile.n).to(gl.int64) * steps
            # Past the last column there is no block: any scale will do.
            high_ptr = low_ptr + gl.where(2 * tile.n + 1 < num_blocks, steps, 0)
        return low_ptr, high_ptr

    @gluon.jit
    def multiply(self, turn, i, tile, steps, CONSUMER: gl.constexpr):
        """`((low, high), next i)`: both parts for a consumer's rows of a tile. i counts steps."""
        low, high = _zeros(), _zeros()
        layout: gl.constexpr = low.type.layout
        if not self.BY_COLUMN:
            low_ptr, high_ptr = self._of_weights(tile, steps)
        for step in range(0, steps):
            if not self.BY_COLUMN:
                low_scale, high_scale = gl.load(low_ptr + step), gl.load(high_ptr + step)
            stage = self.ring.wait(i)
            a, b = self.left.index(stage * CONSUMERS + CONSUMER), self.right.index(stage)
            by_row = self.left_scales.index(stage).slice(CONSUMER * ROWS, ROWS)
            scale_M = by_row.load(gl.SliceLayout(1, layout))
            sums = _multiply_step(a, b.slice(0, CHUNK))
            if self.BY_COLUMN:
                low_scale = self.right_scales.index(stage).slice(0, CHUNK).load(gl.SliceLayout(0, layout))
            low = _promote(low, sums, scale_M, low_scale)
            # Passes at once. ptxas moves nothing past this loop: it would else begin the next MMA before it has
            # promoted the sums above, and need registers for both.
            self.ring.wait(i)
            sums = _multiply_step(a, b.slice(CHUNK, CHUNK))
            if self.BY_COLUMN:
                high_scale = self.right_scales.index(stage).slice(CHUNK, CHUNK).load(gl.SliceLayout(0, layout))
            self.ring.release(stage)
            high = _promote(high, sums, scale_M, high_scale)
            i += 1
        return (low, high), i

    @gluon.jit
    def finish(self, parts, i, NUM_SUBTILES: gl.constexpr):
        """Return both parts."""
        return parts

    @gluon.jit
    def subtile(self, parts, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S (neighbouring columns) of both parts together."""
        EACH: gl.constexpr = NUM_SUBTILES // 2
        return column_subtiles(parts[S // EACH], EACH)[S % EACH]
