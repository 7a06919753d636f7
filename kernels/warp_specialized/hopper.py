"""MMAs of two warpgroups (Hopper), each for half of a tile's rows, with the accumulator in registers."""

from .gluon_compat import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait

ROWS = gl.constexpr(64)  # rows of one consumer: wgmma's M


@gluon.jit
def accumulator(N: gl.constexpr):
    """A consumer's accumulator before its first MMA: zeros, `[ROWS, N]`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    return warpgroup_mma_init(gl.zeros((ROWS, N), gl.float32, layout))


@gluon.jit
def multiply(a, b, acc, i, is_first, empty, STAGES: gl.constexpr):
    """`acc + a @ b`, or `a @ b` in the first step of a tile.

    This MMA is left running. The one before is done, and its stage, that of step i - 1, is given back (a tile's last
    stage in `finish`). So there must be two stages.
    """
    gl.static_assert(STAGES > 1)
    acc = warpgroup_mma(a, b, acc, use_acc=not is_first, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=not is_first)
    return warpgroup_mma_init(acc)  # has the type that `acc` had; the MMA may still run


@gluon.jit
def finish(acc, i, empty, STAGES: gl.constexpr):
    """Wait for the MMAs of a tile, the last of which is in step i - 1; give back that stage, return the accumulator."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1)
    return acc
