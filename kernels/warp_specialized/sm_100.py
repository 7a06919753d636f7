"""Accumulators in tensor memory (Blackwell), for two tiles in turn: MMAs add to one while the other is stored. Where
scales leave room for one alone, it is read as a whole, and the next tile's MMAs begin before this one is stored.

One warp issues the MMAs of the whole block: `tcgen05.mma` is issued by one thread, and its accumulator needs no
registers. The consumer, in which two threads share a row, reads an accumulator subtile by subtile.

Each accumulator has two mbarriers: `done` (all MMAs of its tile are added, `tcgen05.commit` arrives) and `free` (all
its subtiles have been read). Tile j of a program uses accumulator j % TILES in round j // TILES, so both sides wait for
parities, as for stages of `ring.py`. At the stages' `empty`, the MMAs themselves arrive.
"""

from .gluon_compat import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    gl,
    gluon,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    value,
)
from .ring import mbarriers

LANES = gl.constexpr(128)  # of tensor memory


@gluon.jit
def _fence(j, WHERE: gl.constexpr):
    """Execute `tcgen05.fence`, which PTX requires around an mbarrier that orders reads and MMAs of different threads.

    Gluon has no name for it; j is passed through, as inline assembly has to return something.
    """
    return gl.inline_asm_elementwise(
        "tcgen05.fence::" + WHERE + "_thread_sync; mov.b32 $0, $1;", "=r,r", [j], dtype=gl.int32, is_pure=False, pack=1
    )


@aggregate
class TileAccumulators:
    """`[TILES, LANES, columns]` of tensor memory, which has 512 columns, and the mbarriers of each."""

    acc: value
    done: value
    free: value
    TILES: gl.constexpr

    @gluon.jit
    def wait_until_free(self, j):
        """Wait until the accumulator of tile j of this program has been read; return its number."""
        mbarrier.wait(self.free.index(j % self.TILES), (j // self.TILES & 1) ^ 1)
        return _fence(j % self.TILES, "after")

    @gluon.jit
    def commit(self, at):
        """Arrive at `done` of an accumulator when its MMAs are done."""
        tcgen05_commit(self.done.index(at))

    @gluon.jit
    def wait(self, j):
        """Wait until tile j of this program is done; return the number of its accumulator."""
        mbarrier.wait(self.done.index(j % self.TILES), j // self.TILES & 1)
        return _fence(j % self.TILES, "after")

    @gluon.jit
    def subtile(self, at, S: gl.constexpr, NUM_SUBTILES: gl.constexpr):
        """Load subtile S (neighbouring columns) into registers, each once; the last one frees the accumulator."""
        WIDTH: gl.constexpr = self.acc.shape[2] // NUM_SUBTILES
        ACROSS: gl.constexpr = gl.num_warps() // 4  # threads that share a row
        layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // ACROSS], [32, 1], [4, ACROSS], [0, 1])
        subtile = self.acc.index(at).slice(S * WIDTH, WIDTH).load(layout)
        if S == NUM_SUBTILES - 1:
            mbarrier.arrive(self.free.index(_fence(at, "before")), count=1)
        return subtile

    @gluon.jit
    def subtiles(self, at, S: gl.constexpr, NUM_SUBTILES: gl.constexpr):
        """Tuple of all subtiles from S on."""
        subtiles = (self.subtile(at, S, NUM_SUBTILES),)
        if S + 1 < NUM_SUBTILES:
            subtiles = subtiles + self.subtiles(at, S + 1, NUM_SUBTILES)
        return subtiles


@gluon.jit
def tile_accumulators(COLUMNS: gl.constexpr, TILES: gl.constexpr = 2):
    """Allocate them. Call `fence_async_shared` before they are used."""
    layout: gl.constexpr = TensorMemoryLayout([LANES, COLUMNS], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [TILES, LANES, COLUMNS], layout)
    return TileAccumulators(acc, mbarriers(TILES, 1), mbarriers(TILES, 1), TILES)


class InTensorMemory:
    """Accumulators that a warp of its own multiplies into: a consumer passes a tile's number for its product."""

    @gluon.jit
    def multiply(self, turn, i, tile, steps, CONSUMER: gl.constexpr):
        """Return the tile's number."""
        return turn, i


@aggregate
class Accumulators(InTensorMemory):
    """Products of a left and a right operand, as they lie or transposed, in tensor memory."""

    left: value  # stages
    right: value
    ring: value
    tiles: value
    LEFT_TRANSPOSED: gl.constexpr
    RIGHT_TRANSPOSED: gl.constexpr

    @gluon.jit
    def issue(self, j, i, steps):
        """Multiply tile j of this program, `steps > 0` from step i on, and return the next tile's first step.

        Called by the warp that multiplies.
        """
        at = self.tiles.wait_until_free(j)
        for step in range(0, steps):
            stage = self.ring.wait(i)
            a, b = self.left.index(stage), self.right.index(stage)
            if self.LEFT_TRANSPOSED:
                a = a.permute((1, 0))
            if self.RIGHT_TRANSPOSED:
                b = b.permute((1, 0))
            empty = self.ring.empty.index(stage)
            tcgen05_mma(a, b, self.tiles.acc.index(at), use_acc=step > 0, mbarriers=[empty])
            i += 1
        self.tiles.commit(at)
        return i

    @gluon.jit
    def finish(self, turn, i, NUM_SUBTILES: gl.constexpr):
        """Wait for the MMAs of a tile; return the number of its accumulator."""
        return self.tiles.wait(turn)

    @gluon.jit
    def subtile(self, at, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S of a finished tile: read each once, and the last one last."""
        return self.tiles.subtile(at, S, NUM_SUBTILES)


@gluon.jit
def multiply_tiles(walk, accumulators):
    """Partition of the warp that multiplies. It looks up a tile while MMAs still run, if its steps depend on that."""
    i = 0
    for turn in range(0, walk.turns):
        if walk.EARLY:
            i = accumulators.issue(turn, i, walk.tile(turn).steps)
        else:
            i = accumulators.issue(turn, i, walk.steps)
