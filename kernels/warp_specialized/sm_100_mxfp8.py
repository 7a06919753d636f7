"""Products of e4m3 operands with a scale for 32 elements along what is contracted (recipe mxfp8), on Blackwell.

Warps share the work as in `sm_100.py`. A step is 128 elements along what is contracted, of 128 rows of the left
operand and of a tile's columns of the right one. TMA loads their scales with them: 512 bytes for 128 rows or columns,
in the order that `tcgen05.cp` takes. The warp that multiplies copies these to tensor memory, where `tcgen05.mma` needs
them. There is one set of scales, and nothing waits for a copy: PTX orders a copy before the MMAs that the same thread
issues later. That it also orders MMAs before a later copy is an assumption: PTX does not list that pair. A tutorial of
Triton's says so (`python/tutorials/gluon/06-tcgen05.py`), and CUTLASS relies on it
(`sm100_blockscaled_mma_array_warpspecialized.hpp`).

An accumulator of 256 columns leaves no room in tensor memory for a second one beside the scales.

Stages of M-ragged passes are `[rows, 128]` and `[columns, 128]`. In wgrad operands are `MN_MAJOR`: `[128, rows]` and
`[128, columns]`.
"""

from .gluon_compat import (
    TensorMemoryScalesLayout,
    aggregate,
    allocate_tensor_memory,
    fence_async_shared,
    gl,
    gluon,
    tcgen05_copy,
    tcgen05_mma_scaled,
    value,
)
from .ring import make_ring, shared_tiles
from .rows import rows_operand, weights_operand
from .scaled_rows import CHUNK, LINES, scale_stages, scaled_rows, scaled_weights
from .sm_100 import ROWS, InTensorMemory, tile_accumulators


@gluon.jit
def _by_row(scales):
    """Scales of a stage as MMAs take them: one for each row or column and 32 elements."""
    CHUNKS: gl.constexpr = scales.shape[0] // LINES
    return scales.reshape((CHUNKS, 32, 4, 4)).permute((0, 2, 1, 3)).reshape((CHUNKS * CHUNK, 4))


@gluon.jit
def _scales_in_tensor_memory(COLUMNS: gl.constexpr):
    """Memory for the scales of a step, of the right and of the left operand."""
    layout: gl.constexpr = TensorMemoryScalesLayout()
    # In this order: Triton 3.6 writes the second chunk of a copy to the wrong place if others are allocated before.
    right = allocate_tensor_memory(gl.uint8, [COLUMNS, 4], layout)
    return right, allocate_tensor_memory(gl.uint8, [ROWS, 4], layout)


@aggregate
class Accumulators(InTensorMemory):
    """Products of two operands with scales; the consumer reads all READS subtiles before it stores any."""

    left: value  # stages
    right: value
    left_stages: value  # of scales
    right_stages: value
    ring: value
    tiles: value
    scales: value  # in tensor memory, of the right and of the left operand
    MN_MAJOR: gl.constexpr
    READS: gl.constexpr
    ZEROED: gl.constexpr  # whether a tile without steps is zeros: its accumulator has another tile's sums

    @gluon.jit
    def issue(self, j, i, steps):
        """Multiply tile j of this program, its steps from step i on, and return the next tile's first step.

        Called by the warp that multiplies.
        """
        right_scales, left_scales = self.scales
        at = self.tiles.wait_until_free(j)
        for step in range(0, steps):
            stage = self.ring.wait(i)
            a, b = self.left.index(stage), self.right.index(stage)
            if self.MN_MAJOR:
                a = a.permute((1, 0))
            else:
                b = b.permute((1, 0))
            tcgen05_copy(_by_row(self.left_stages.index(stage)), left_scales)
            tcgen05_copy(_by_row(self.right_stages.index(stage)), right_scales)
            acc, empty = self.tiles.acc.index(at), self.ring.empty.index(stage)
            tcgen05_mma_scaled(
                a, b, acc, left_scales, right_scales, "e4m3", "e4m3", use_acc=step > 0, mbarriers=[empty]
            )
            i += 1
        self.tiles.commit(at)
        return i

    @gluon.jit
    def finish(self, turn, i):
        """Wait for the MMAs of a tile; return its subtiles."""
        return self.tiles.subtiles(self.tiles.wait(turn), 0, self.READS)

    @gluon.jit
    def subtile(self, subtiles, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S of a finished tile."""
        return gl.where(tile.steps > 0, subtiles[S], 0.0) if self.ZEROED else subtiles[S]


@gluon.jit
def make_accumulators(
    operands, scales, MN_MAJOR: gl.constexpr, READS: gl.constexpr, ZEROED: gl.constexpr, TILE: gl.constexpr
):
    """`(ring, accumulators)`; `operands`, `scales`: stages of the left and of the right operand."""
    gl.static_assert(TILE.num_stages > 1)
    ring = make_ring(TILE.num_stages, 1)
    tiles = tile_accumulators(operands[1].shape[2 if MN_MAJOR else 1], 1)
    fence_async_shared()
    in_memory = _scales_in_tensor_memory(operands[1].shape[2 if MN_MAJOR else 1])
    return ring, Accumulators(
        operands[0], operands[1], scales[0], scales[1], ring, tiles, in_memory, MN_MAJOR, READS, ZEROED
    )


@gluon.jit
def ragged_operands(x, w, N, HALVES: gl.constexpr, READS: gl.constexpr, TILE: gl.constexpr):
    """`(left, right, ring, accumulators)` of an M-ragged pass; `x`, `w`: descriptors of elements and of scales."""
    gl.static_assert(TILE.BLOCK_M == ROWS)
    gl.static_assert(TILE.BLOCK_K == CHUNK)
    STAGES: gl.constexpr = TILE.num_stages
    x_stages = shared_tiles(x[0].dtype, STAGES, ROWS, CHUNK)
    w_stages = shared_tiles(w[0].dtype, STAGES, TILE.BLOCK_N, CHUNK)
    x_scales, w_scales = scale_stages(gl.uint8, STAGES, ROWS), scale_stages(gl.uint8, STAGES, TILE.BLOCK_N)
    left = scaled_rows(rows_operand(x[0], (None, None, None, None), x_stages, 0, 1, False), x[1], x_scales)
    right = scaled_weights(weights_operand(w[0], 0, w_stages, False, True, HALVES), w[1], w_scales, N)
    ring, accumulators = make_accumulators((x_stages, w_stages), (x_scales, w_scales), False, READS, False, TILE)
    return left, right, ring, accumulators
