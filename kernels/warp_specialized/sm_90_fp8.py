"""Products of e4m3 operands (recipe fp8_block) on Hopper, by one producer and two consumers of 64 rows each.

A step is a block of 128 of what is contracted, for which each row of the left operand has one scale. `wgmma` keeps 13
bits of fraction of sums of 8-bit products, so each part of a tile's columns has sums of its own in a step. They are
then promoted: multiplied by both scales and added to the accumulator in fp32.
"""

from ..device.tiles import column_subtiles, side_by_side
from .gluon_compat import aggregate, gl, gluon, value, warpgroup_mma, warpgroup_mma_wait
from .scaled_rows import CHUNK
from .sm_90 import ROWS

CONSUMERS = gl.constexpr(2)


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    """Accumulator of a part before its first step, `[ROWS, COLUMNS]`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32]
    )
    return gl.zeros((ROWS, COLUMNS), gl.float32, layout)


@gluon.jit
def _begin_to_multiply(a_MR, b_NR):
    """Begin `a @ b^T` of a part and a step. The first `wgmma` ignores the zeros."""
    return warpgroup_mma(a_MR, b_NR.permute((1, 0)), _zeros(b_NR.shape[0]), use_acc=False, is_async=True)


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


@gluon.jit
def _row_scales(scales, stage, layout: gl.constexpr, CONSUMER: gl.constexpr):
    """Scales of a consumer's rows in a step."""
    return scales.index(stage).slice(CONSUMER * ROWS, ROWS).load(gl.SliceLayout(1, layout))


@aggregate
class ColumnScaled:
    """Products with an operand that has a scale for each column, in stages, as the left one has for each row: in two
    parts of neighbouring columns. Nothing runs after `multiply`.

    Loads of scales wait behind those of the MMAs, which leave little of the shared memory's bandwidth: with parts of 64
    columns, whose MMAs need all of it, this is no faster.
    """

    left: value  # stages
    right: value
    left_scales: value  # stages
    right_scales: value
    ring: value

    @gluon.jit
    def multiply(self, turn, i, tile, steps, CONSUMER: gl.constexpr):
        """`((low, high), next i)`: both parts for a consumer's rows of a tile. i counts steps."""
        low, high = _zeros(CHUNK), _zeros(CHUNK)
        layout: gl.constexpr = low.type.layout
        for _ in range(0, steps):
            stage = self.ring.wait(i)
            a, b = self.left.index(stage * CONSUMERS + CONSUMER), self.right.index(stage)
            scale_M = _row_scales(self.left_scales, stage, layout, CONSUMER)
            scale_N = self.right_scales.index(stage)
            sums = warpgroup_mma_wait(0, deps=[_begin_to_multiply(a, b.slice(0, CHUNK))])
            low = _promote(low, sums, scale_M, scale_N.slice(0, CHUNK).load(gl.SliceLayout(0, layout)))
            self.ring.fence(i)
            sums = warpgroup_mma_wait(0, deps=[_begin_to_multiply(a, b.slice(CHUNK, CHUNK))])
            high_N = scale_N.slice(CHUNK, CHUNK).load(gl.SliceLayout(0, layout))
            self.ring.release(stage)
            high = _promote(high, sums, scale_M, high_N)
            i += 1
        return (low, high), i

    @gluon.jit
    def finish(self, parts, i, NUM_SUBTILES: gl.constexpr):
        """Return both parts."""
        return parts

    @gluon.jit
    def subtile(self, parts, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S (neighbouring columns) of both parts together."""
        return _subtile(parts, S, NUM_SUBTILES)


@gluon.jit
def _subtile(halves, S: gl.constexpr, NUM_SUBTILES: gl.constexpr):
    """Subtile S of two halves of a tile's columns together."""
    EACH: gl.constexpr = NUM_SUBTILES // 2
    return column_subtiles(halves[S // EACH], EACH)[S % EACH]


@aggregate
class WeightScaled:
    """Products with weights, which have a scale for CHUNK columns, in memory: `[E, ceil(N / CHUNK), ceil(K / CHUNK)]`.
    Nothing runs after `multiply`.

    A tile has two halves of CHUNK columns: neighbouring ones or, of weights in two HALVES, which N / 2 divides into
    whole blocks, the same columns of each. Each has two parts. While the sums of one part are promoted, the MMAs of the
    next one run.
    """

    left: value  # stages
    right: value
    left_scales: value  # stages
    right_scales: value
    ring: value
    N: value
    HALVES: gl.constexpr

    @gluon.jit
    def _scales(self, tile, steps):
        """Addresses of the scales of both halves of a tile, one for each step."""
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
        """`(four parts for a consumer's rows of a tile, next i)`. i counts steps."""
        PART: gl.constexpr = CHUNK // 2
        acc0, acc1, acc2, acc3 = _zeros(PART), _zeros(PART), _zeros(PART), _zeros(PART)
        layout: gl.constexpr = acc0.type.layout
        low_ptr, high_ptr = self._scales(tile, steps)
        for step in range(0, steps):
            low, high = gl.load(low_ptr + step), gl.load(high_ptr + step)
            stage = self.ring.wait(i)
            a, b = self.left.index(stage * CONSUMERS + CONSUMER), self.right.index(stage)
            scale_M = _row_scales(self.left_scales, stage, layout, CONSUMER)
            sums0 = _begin_to_multiply(a, b.slice(0, PART))
            sums1 = _begin_to_multiply(a, b.slice(PART, PART))
            sums0 = warpgroup_mma_wait(1, deps=[sums0])
            acc0 = _promote(acc0, sums0, scale_M, low)
            sums2 = _begin_to_multiply(a, b.slice(2 * PART, PART))
            sums1 = warpgroup_mma_wait(1, deps=[sums1])
            acc1 = _promote(acc1, sums1, scale_M, low)
            self.ring.fence(i)
            sums3 = _begin_to_multiply(a, b.slice(3 * PART, PART))
            sums2 = warpgroup_mma_wait(1, deps=[sums2])
            acc2 = _promote(acc2, sums2, scale_M, high)
            sums3 = warpgroup_mma_wait(0, deps=[sums3])
            self.ring.release(stage)
            acc3 = _promote(acc3, sums3, scale_M, high)
            i += 1
        return (acc0, acc1, acc2, acc3), i

    @gluon.jit
    def finish(self, parts, i, NUM_SUBTILES: gl.constexpr):
        """Return both halves."""
        return side_by_side(parts[0], parts[1]), side_by_side(parts[2], parts[3])

    @gluon.jit
    def subtile(self, halves, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S (neighbouring columns) of both halves together."""
        return _subtile(halves, S, NUM_SUBTILES)
