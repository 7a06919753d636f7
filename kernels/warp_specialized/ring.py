"""A ring of stages in shared memory, which one partition of a warp-specialized kernel fills and others read.

Every stage has two mbarriers. `full`: its bytes have arrived. `empty`: it has been read. Step i, counted over all
tiles of a program, uses stage `i % STAGES` in round `i // STAGES`, so each side waits for a parity and counts nothing
else. A wait for parity 1 on a new mbarrier passes, so the first STAGES loads do not wait. The partition that fills the
ring runs ahead by up to STAGES steps, into the next tile, while the last one is still written.

Arrivals. At `full`: one with the number of bytes that TMA will bring, and one of each thread that copies itself, when
its copies are done. At `empty`: one of each partition that reads; one thread arrives for it, after a barrier of all its
warps (`bar.sync`), which the compiler adds.

Fences. Bytes that TMA brings are visible to MMAs. Copies of threads are made with the generic proxy, and MMAs read with
the asynchronous one, so where threads copy, those that multiply fence after their wait.

docs/kernels.md derives that no wait is for ever and nothing is overwritten while it is read.
"""

from .gluon_compat import aggregate, fence_async_shared, gl, gluon, mbarrier, value


@gluon.jit
def mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT mbarriers, each expecting ARRIVALS arrivals. Call `fence_async_shared` before they are used."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def shared_tiles(
    DTYPE: gl.constexpr, COUNT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, TRANSPOSED: gl.constexpr = False
):
    """`[COUNT, M, N]` or TRANSPOSED, `[COUNT, N, M]`, of shared memory as TMA and MMAs need it, swizzled as
    `Descriptor.described` tells TMA.
    """
    WIDTH: gl.constexpr = (M if TRANSPOSED else N) * DTYPE.primitive_bitwidth // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if WIDTH > 128 else WIDTH, element_bitwidth=DTYPE.primitive_bitwidth, rank=2
    )
    return gl.allocate_shared_memory(DTYPE, [COUNT, N, M] if TRANSPOSED else [COUNT, M, N], layout)


@aggregate
class Ring:
    """The mbarriers of STAGES stages, or of several rings of STAGES each, one after the other, for one reader each."""

    full: value
    empty: value
    STAGES: gl.constexpr
    COPIED: gl.constexpr  # whether threads copy into stages

    @gluon.jit
    def acquire(self, i, BYTES: gl.constexpr, FIRST: gl.constexpr = 0):
        """Wait until the stage of step i is free, announce the BYTES that TMA will bring, return the stage."""
        stage = FIRST + i % self.STAGES
        mbarrier.wait(self.empty.index(stage), (i // self.STAGES & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), BYTES)
        return stage

    @gluon.jit
    def wait(self, i, FIRST: gl.constexpr = 0):
        """Wait until the stage of step i is full, return it."""
        stage = FIRST + i % self.STAGES
        mbarrier.wait(self.full.index(stage), i // self.STAGES & 1)
        if self.COPIED:
            fence_async_shared()
        return stage

    @gluon.jit
    def fence(self, i):
        """Wait once more for the stage of step i, which passes at once. ptxas moves nothing past the loop of a wait: it
        would else begin MMAs before it has read the sums of the ones before, and need registers for both.
        """
        self.wait(i)

    @gluon.jit
    def release(self, stage, pred=True):
        """Give a stage back that this partition has read."""
        mbarrier.arrive(self.empty.index(stage), count=1, pred=pred)


@gluon.jit
def make_ring(STAGES: gl.constexpr, READERS: gl.constexpr, COPIERS: gl.constexpr = 0, RINGS: gl.constexpr = 1):
    """RINGS rings of STAGES stages, for READERS partitions each, into which COPIERS threads copy.

    Call `fence_async_shared` before it is used.
    """
    full, empty = mbarriers(RINGS * STAGES, 1 + COPIERS), mbarriers(RINGS * STAGES, READERS)
    return Ring(full, empty, STAGES, COPIERS > 0)
