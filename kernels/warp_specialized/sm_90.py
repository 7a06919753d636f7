"""MMAs of two warpgroups (Hopper), each for a part of a tile's rows, with the accumulator in registers."""

from ..device.tiles import column_subtiles
from .gluon_compat import aggregate, gl, gluon, value, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait

ROWS = gl.constexpr(64)  # wgmma's M


@aggregate
class Accumulators:
    """Accumulators of two consumers, `[rows, COLUMNS]` each; left and right are multiplied as they lie or transposed.

    i counts steps. While an MMA runs, the one before is done and its stage is given back, a tile's last stage in
    `finish`. So there must be two stages.
    """

    left: value  # stages; those of the second consumer follow those of the first
    right: value
    ring: value
    LEFT_TRANSPOSED: gl.constexpr
    RIGHT_TRANSPOSED: gl.constexpr
    COLUMNS: gl.constexpr

    @gluon.jit
    def multiply(self, turn, i, tile, steps, CONSUMER: gl.constexpr):
        """`(product of a consumer's part of a tile, next i)`, to be passed to `finish`; `steps > 0`.

        The last step's MMAs still run, and hide what the caller computes before it calls `finish`.
        """
        STAGES: gl.constexpr = self.ring.STAGES
        M: gl.constexpr = self.left.shape[2 if self.LEFT_TRANSPOSED else 1]
        layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.COLUMNS, 16]
        )
        gl.static_assert(STAGES > 1)
        gl.assume(steps > 0)
        acc = warpgroup_mma_init(gl.zeros((M, self.COLUMNS), gl.float32, layout))
        for step in range(0, steps):
            stage = self.ring.wait(i)
            a, b = self.left.index(stage * 2 + CONSUMER), self.right.index(stage)
            if self.LEFT_TRANSPOSED:
                a = a.permute((1, 0))
            if self.RIGHT_TRANSPOSED:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            self.ring.release((i + STAGES - 1) % STAGES, step > 0)
            acc = warpgroup_mma_init(acc)  # has the type that `acc` had; the MMA may still run
            i += 1
        return acc, i

    @gluon.jit
    def finish(self, acc, i, NUM_SUBTILES: gl.constexpr):
        """Wait for the MMAs of a tile, the last of which is in step i - 1; give back that stage."""
        acc = warpgroup_mma_wait(0, deps=[acc])
        self.ring.release((i + self.ring.STAGES - 1) % self.ring.STAGES)
        return acc

    @gluon.jit
    def subtile(self, acc, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S (neighbouring columns) of a finished tile."""
        return column_subtiles(acc, NUM_SUBTILES)[S]
