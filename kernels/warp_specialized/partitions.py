"""Partitions of warp-specialized kernels. All passes share them: a pass has its walk, operands, accumulators, epilogue.

The producer loads: one warp or, where rows are gathered, four (in dgrad_act on Hopper two). On Hopper, two consumers
multiply in registers and write (`sm_90.py`). On Blackwell, one warp multiplies, and one consumer reads accumulators in
tensor memory and writes (`sm_100.py`).
"""

import triton

from . import sm_90, sm_90_fp8, sm_100, sm_100_mxfp8
from .gluon_compat import fence_async_shared, gl, gluon, tma_store_wait
from .ring import make_ring, shared_tiles
from .rows import Adapted, rows_operand, weights_operand
from .scaled_rows import CHUNK, scale_stages, scaled_rows, scaled_weights


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
def make_accumulators(
    left,
    right,
    ring,
    LEFT_TRANSPOSED: gl.constexpr,
    RIGHT_TRANSPOSED: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Accumulators of 16-bit operands, as they lie in their stages or transposed, with COLUMNS."""
    return (
        sm_90.Accumulators(left, right, ring, LEFT_TRANSPOSED, RIGHT_TRANSPOSED, COLUMNS)
        if CONSUMERS == 2
        else sm_100.Accumulators(
            left, right, ring, sm_100.tile_accumulators(COLUMNS), LEFT_TRANSPOSED, RIGHT_TRANSPOSED
        )
    )


@gluon.jit
def ragged_operands(
    x,
    w,
    adapter,
    REVERSED: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    HALVES: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    OTHERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """`(left, right, ring, accumulators)` of an M-ragged pass: rows of `x` by COLUMNS of weights.

    `x`: `(descriptor, descriptor of scales, gather)`, see `rows_operand`; `w`: `(descriptor, scales, number of experts,
    columns)`, whose scales are a pointer (fp8_block) or a descriptor (mxfp8); `adapter`, in 16 bits: `(pointer to t,
    descriptor of t, descriptor of b, rank)`. None where unused.
    """
    x_desc, x_scales_desc, gather = x
    w_desc, w_scales, num_experts, num_columns = w
    t_ptr, t_desc, b_desc, rank = adapter
    STAGES: gl.constexpr = TILE.num_stages
    GATHERED: gl.constexpr = gather[2] is not None
    x = shared_tiles(w_desc.dtype, STAGES * CONSUMERS, TILE.BLOCK_M // CONSUMERS, TILE.BLOCK_K)
    w = shared_tiles(w_desc.dtype, STAGES, TILE.BLOCK_K, COLUMNS, K_CONTIGUOUS)
    left = rows_operand(x_desc, gather, x, 0, CONSUMERS, False)
    right = weights_operand(w_desc, num_experts, w, REVERSED, K_CONTIGUOUS, HALVES)
    if rank is not None:
        steps = gl.cdiv(gather[3], TILE.BLOCK_K)
        t = rows_operand(t_desc, (t_ptr, rank, None, rank), x, 0, CONSUMERS, False)
        left = Adapted(left, t, steps, left.BYTES, left.GATHERED)
        b = weights_operand(b_desc, num_experts, w, False, K_CONTIGUOUS, HALVES)
        right = Adapted(right, b, steps, right.BYTES, False)
    ring = make_ring(STAGES, CONSUMERS, copiers(CONSUMERS, GATHERED, OTHERS))
    if x_scales_desc is None:
        accumulators = make_accumulators(x, w, ring, False, K_CONTIGUOUS, COLUMNS, CONSUMERS)
    else:
        gl.static_assert(TILE.BLOCK_K == CHUNK)
        x_scales = scale_stages(x_scales_desc.dtype, STAGES, TILE.BLOCK_M)
        left = scaled_rows(left, x_scales_desc, x_scales)
        if CONSUMERS == 2:
            accumulators = sm_90_fp8.WeightScaled(x, w, x_scales, w_scales, ring, num_columns, HALVES)
        else:
            scales = scale_stages(w_scales.dtype, STAGES, COLUMNS)
            right = scaled_weights(right, w_scales, scales, num_columns)
            accumulators = sm_100_mxfp8.make_accumulators(x, w, x_scales, scales, ring, False, False)
    fence_async_shared()
    return left, right, ring, accumulators
