"""Accumulators in tensor memory (Blackwell), for two tiles in turn: MMAs add to one while the other is stored. Where
scales leave room for one alone, it is read as a whole, and the next tile's MMAs begin before this one is stored.

One warp issues the MMAs of the whole block: `tcgen05.mma` is issued by one thread, and its accumulator needs no
registers. The consumer, in which two threads share a row, reads an accumulator subtile by subtile.

Each accumulator has two mbarriers: `done` (all MMAs of its tile are added, `tcgen05.commit` arrives) and `free` (all
its subtiles have been read). Tile j of a program uses accumulator j % TILES in round j // TILES, so both sides wait for
parities, as for stages of `warp_specialized/ring.py`. At the stages' `empty`, the MMAs themselves arrive.
"""

from .gluon_compat import TensorMemoryLayout, allocate_tensor_memory, gl, gluon, mbarrier, tcgen05_commit, tcgen05_mma
from .ring import mbarriers, wait_for_operands

ROWS = gl.constexpr(128)  # lanes of tensor memory


@gluon.jit
def _fence(j, WHERE: gl.constexpr):
    """Execute `tcgen05.fence`, which PTX requires around an mbarrier that orders reads and MMAs of different threads.

    Gluon has no name for it; j is passed through, as inline assembly has to return something.
    """
    return gl.inline_asm_elementwise(
        "tcgen05.fence::" + WHERE + "_thread_sync; mov.b32 $0, $1;", "=r,r", [j], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tile_accumulators(COLUMNS: gl.constexpr, TILES: gl.constexpr = 2):
    """`(acc, done, free)`: `[TILES, ROWS, COLUMNS]` of tensor memory, which has 512 columns, and their mbarriers."""
    layout: gl.constexpr = TensorMemoryLayout([ROWS, COLUMNS], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [TILES, ROWS, COLUMNS], layout)
    return acc, mbarriers(TILES, 1), mbarriers(TILES, 1)


@gluon.jit
def wait_until_free(j, accumulators):
    """Wait until the accumulator of tile j of this program has been read; return its number."""
    acc, _, free = accumulators
    TILES: gl.constexpr = acc.shape[0]
    mbarrier.wait(free.index(j % TILES), (j // TILES & 1) ^ 1)
    return _fence(j % TILES, "after")


@gluon.jit
def multiply_tile(
    j, i, steps, operands, LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr, STAGES: gl.constexpr
):
    """Multiply tile j of this program, `steps > 0` from step i on, and return the next tile's first step.

    Called by the warp that multiplies. `operands` is `(left, right, full, empty, accumulators)`; left and right are
    multiplied as they lie or transposed.
    """
    left, right, full, empty, accumulators = operands
    acc, done, _ = accumulators
    at = wait_until_free(j, accumulators)
    for step in range(0, steps):
        stage = wait_for_operands(i, full, STAGES)
        a, b = left.index(stage), right.index(stage)
        if LEFT_TRANSPOSED:
            a = a.permute((1, 0))
        if RIGHT_TRANSPOSED:
            b = b.permute((1, 0))
        tcgen05_mma(a, b, acc.index(at), use_acc=step > 0, mbarriers=[empty.index(stage)])
        i += 1
    tcgen05_commit(done.index(at))
    return i


@gluon.jit
def multiply_tiles(K, pipeline, K_CONTIGUOUS: gl.constexpr, TILE: gl.constexpr):
    """Partition of the warp that multiplies in an M-ragged pass; `K > 0`."""
    num_m, num_n, x, w, full, empty, accumulators = pipeline
    operands = (x, w, full, empty, accumulators)
    i = 0
    for j in range(0, gl.cdiv(num_m * num_n - gl.program_id(0), gl.num_programs(0))):
        steps = gl.cdiv(K, TILE.BLOCK_K)
        i = multiply_tile(j, i, steps, operands, False, K_CONTIGUOUS, TILE.num_stages)


@gluon.jit
def wait_for_accumulator(j, accumulators):
    """Wait until tile j of this program is done; return `(its accumulator, mbarriers free, its number)`."""
    acc, done, free = accumulators
    TILES: gl.constexpr = acc.shape[0]
    mbarrier.wait(done.index(j % TILES), j // TILES & 1)
    at = _fence(j % TILES, "after")
    return acc.index(at), free, at


@gluon.jit
def read_subtile(tile, S: gl.constexpr, NUM_SUBTILES: gl.constexpr):
    """Load subtile S of NUM_SUBTILES from `wait_for_accumulator` into registers; the last one frees the accumulator."""
    acc, free, at = tile
    WIDTH: gl.constexpr = acc.shape[1] // NUM_SUBTILES
    ACROSS: gl.constexpr = gl.num_warps() // 4  # threads that share a row
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // ACROSS], [32, 1], [4, ACROSS], [0, 1])
    subtile = acc.slice(S * WIDTH, WIDTH).load(layout)
    if S == NUM_SUBTILES - 1:
        mbarrier.arrive(free.index(_fence(at, "before")), count=1)
    return subtile


@gluon.jit
def read_subtiles(tile, S: gl.constexpr, NUM_SUBTILES: gl.constexpr):
    """Tuple of all subtiles from S on."""
    subtiles = (read_subtile(tile, S, NUM_SUBTILES),)
    if S + 1 < NUM_SUBTILES:
        subtiles = subtiles + read_subtiles(tile, S + 1, NUM_SUBTILES)
    return subtiles
