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
    gl,
    gluon,
    tcgen05_copy,
    tcgen05_mma_scaled,
    value,
)
from .scaled_rows import CHUNK, LINES
from .sm_100 import LANES, InTensorMemory, tile_accumulators


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
    return right, allocate_tensor_memory(gl.uint8, [LANES, 4], layout)


@aggregate
class Accumulators(InTensorMemory):
    """Products of two operands with scales; the consumer reads all subtiles before it stores any."""

    left: value  # stages
    right: value
    left_stages: value  # of scales
    right_stages: value
    ring: value
    tiles: value
    scales: value  # in tensor memory, of the right and of the left operand
    MN_MAJOR: gl.constexpr
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
    def finish(self, turn, i, NUM_SUBTILES: gl.constexpr):
        """Wait for the MMAs of a tile; return its subtiles."""
        return self.tiles.subtiles(self.tiles.wait(turn), 0, NUM_SUBTILES)

    @gluon.jit
    def subtile(self, subtiles, S: gl.constexpr, NUM_SUBTILES: gl.constexpr, tile):
        """Subtile S of a finished tile."""
        return gl.where(tile.steps > 0, subtiles[S], 0.0) if self.ZEROED else subtiles[S]


@gluon.jit
def make_accumulators(left, right, left_scales, right_scales, ring, MN_MAJOR: gl.constexpr, ZEROED: gl.constexpr):
    """Accumulators of a tile; the first four are stages."""
    gl.static_assert(ring.STAGES > 1)
    COLUMNS: gl.constexpr = right.shape[2 if MN_MAJOR else 1]
    tiles, scales = tile_accumulators(COLUMNS, 1), _scales_in_tensor_memory(COLUMNS)
    return Accumulators(left, right, left_scales, right_scales, ring, tiles, scales, MN_MAJOR, ZEROED)
