"""Partitions of warp-specialized kernels. All passes share them: a pass has its walk, operands, accumulators, epilogue.

The producer loads: one warp or, where rows are gathered, four (in dgrad_act on Hopper two). On Hopper, two consumers
multiply in registers and write (`sm_90.py`). On Blackwell, one warp multiplies, and one consumer reads accumulators in
tensor memory and writes (`sm_100.py`).
"""

import triton

from . import sm_90, sm_100
from .gluon_compat import fence_async_shared, gl, gluon, tma_store_wait
from .ring import make_ring, shared_tiles
from .rows import rows_operand, weights_operand


@triton.constexpr_function
def worker_warps(consumers, gathered=False, others=0):
    """Number of warps of each partition after the first consumer: second consumer or multiplying warp, producer,
    `others`.

    A producer that gathers has four warps or, beside `others` on Hopper, two: with 512 threads ptxas would have 128
    registers for each, too few for `wgmma`.
    """
    gathering = 2 if consumers == 2 and others else 4
    return [4 if consumers == 2 else 1, gathering if gathered else 1, *[1] * others]


@triton.constexpr_function
def worker_registers(consumers, gathered=False, others=0):
    """Registers per thread of the same partitions; the default one takes the rest of the 65,536.

    Partitions of one warp need few; up to four of them count as one warpgroup. Threads that gather have row ids and
    addresses: on Hopper 216 + 216 + 72 = 3 * 168.
    """
    if consumers == 2:
        return [216, 72, *[72] * others] if gathered else [232, 40, *[40] * others]
    return [40, 88 if gathered else 40, *[40] * others]


@triton.constexpr_function
def copiers(consumers, gathered, others=0):
    """Threads that copy gathered rows, each of which arrives at a stage: none on Blackwell, where TMA gathers."""
    return 32 * worker_warps(consumers, gathered, others)[1] if consumers == 2 and gathered else 0


@gluon.jit
def produce(walk, left, right, ring):
    """Partition of the producer: load both operands of each step of each tile."""
    BYTES: gl.constexpr = left.BYTES + right.BYTES
    i = 0
    for turn in range(0, walk.turns):
        tile = walk.tile(turn)
        left_ids, right_ids = left.begin(walk, tile), right.begin(walk, tile)
        if walk.LISTED:
            at = walk.step(tile, 0)
        for step in range(0, tile.steps):
            stage = ring.acquire(i, BYTES)
            i += 1
            arrived = ring.full.index(stage)
            if not walk.LISTED:
                at = walk.step(tile, step)
            if left.BYTES:
                left_ids = left.load(left_ids, walk, tile, step, at, stage, arrived)
            right_ids = right.load(right_ids, walk, tile, step, at, stage, arrived)
            if not left.BYTES:  # copies take longer to issue than TMA's loads
                left_ids = left.load(left_ids, walk, tile, step, at, stage, arrived)
            if walk.LISTED:
                at = walk.step(tile, gl.minimum(step + 1, tile.steps - 1))


@gluon.jit
def consume(walk, accumulators, epilogue, CONSUMER: gl.constexpr):
    """Partition of a consumer: finish each tile. It looks a tile up before its steps (EARLY), or while the MMAs of the
    last one run.
    """
    i = 0
    epilogue.begin(walk, CONSUMER)
    for turn in range(0, walk.turns):
        if walk.EARLY:
            tile = walk.tile(turn)
            acc, i = accumulators.multiply(turn, i, tile, tile.steps, CONSUMER)
        else:
            acc, i = accumulators.multiply(turn, i, None, walk.steps, CONSUMER)
            tile = walk.tile(turn)
        epilogue.write(walk, accumulators, acc, i, tile, turn, CONSUMER)
    tma_store_wait(0)


@gluon.jit
def _help(walk, helper):
    """Partition of one more warp."""
    helper.load(walk)


@gluon.jit
def run(walk, left, right, ring, accumulators, epilogue, CONSUMERS: gl.constexpr, helper=None):
    """Run all partitions; the one of `helper`, if there is one, calls its method `load(walk)`."""
    GATHERED: gl.constexpr = left.GATHERED or right.GATHERED
    if helper is None:
        gl.warp_specialize(
            [
                (consume, (walk, accumulators, epilogue, gl.constexpr(0))),
                (consume, (walk, accumulators, epilogue, gl.constexpr(1)))
                if CONSUMERS == 2
                else (sm_100.multiply_tiles, (walk, accumulators)),
                (produce, (walk, left, right, ring)),
            ],
            worker_warps(CONSUMERS, GATHERED),
            worker_registers(CONSUMERS, GATHERED),
        )
    else:
        gl.warp_specialize(
            [
                (consume, (walk, accumulators, epilogue, gl.constexpr(0))),
                (consume, (walk, accumulators, epilogue, gl.constexpr(1)))
                if CONSUMERS == 2
                else (sm_100.multiply_tiles, (walk, accumulators)),
                (produce, (walk, left, right, ring)),
                (_help, (walk, helper)),
            ],
            worker_warps(CONSUMERS, GATHERED, 1),
            worker_registers(CONSUMERS, GATHERED, 1),
        )


@gluon.jit
def ring_and_accumulators(
    left,
    right,
    LEFT_TRANSPOSED: gl.constexpr,
    RIGHT_TRANSPOSED: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    GATHERED: gl.constexpr,
    OTHERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The ring of both operands' stages, and the accumulators of a tile with COLUMNS."""
    ring = make_ring(STAGES, CONSUMERS, copiers(CONSUMERS, GATHERED, OTHERS))
    if CONSUMERS == 2:
        accumulators = sm_90.Accumulators(left, right, ring, LEFT_TRANSPOSED, RIGHT_TRANSPOSED, COLUMNS)
    else:
        accumulators = sm_100.make_accumulators(left, right, ring, LEFT_TRANSPOSED, RIGHT_TRANSPOSED, COLUMNS)
    fence_async_shared()
    return ring, accumulators


@gluon.jit
def ragged_operands(
    x_desc,
    gather,
    weights,
    REVERSED: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    HALVES: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    OTHERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`(left, right, ring, accumulators)` of an M-ragged pass: rows of `x` by COLUMNS of weights.

    `gather`: as for `rows_operand`; `weights`: descriptor and number of experts.
    """
    STAGES: gl.constexpr = TILE.num_stages
    DEPTH: gl.constexpr = TILE.BLOCK_K
    DTYPE: gl.constexpr = weights[0].dtype
    GATHERED: gl.constexpr = gather[2] is not None
    x = shared_tiles(DTYPE, STAGES * CONSUMERS, TILE.BLOCK_M // CONSUMERS, DEPTH)
    w = shared_tiles(DTYPE, STAGES, COLUMNS if K_CONTIGUOUS else DEPTH, DEPTH if K_CONTIGUOUS else COLUMNS)
    left = rows_operand(x_desc, gather, x, 0, CONSUMERS, False)
    right = weights_operand(*weights, w, REVERSED, K_CONTIGUOUS, HALVES)
    ring, accumulators = ring_and_accumulators(x, w, False, K_CONTIGUOUS, COLUMNS, CONSUMERS, GATHERED, OTHERS, STAGES)
    return left, right, ring, accumulators
