"""Operands of 8 bits as the producer loads them, with scales: see `rows.py`. Scales come in chunks of 512 bytes, for
128 rows or columns in a step: 128 fp32 (fp8_block), or two lines of 256 bytes, the longest that TMA moves (mxfp8).
"""

from .gluon_compat import aggregate, gl, gluon, tma_load, value
from .rows import InOrder

CHUNK = gl.constexpr(128)  # rows or columns that share a chunk; elements of a step
CHUNK_BYTES = gl.constexpr(512)
LINES = gl.constexpr(2)


@gluon.jit
def scale_stages(DTYPE: gl.constexpr, STAGES: gl.constexpr, SIZE: gl.constexpr):
    """Scales of SIZE rows or columns, as TMA loads them: stages in shared memory."""
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    RANK: gl.constexpr = 1 if BITS == 32 else 2
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=BITS, rank=RANK)
    if BITS == 32:
        stages = gl.allocate_shared_memory(DTYPE, [STAGES, SIZE], layout)
    else:
        stages = gl.allocate_shared_memory(DTYPE, [STAGES, SIZE // CHUNK * LINES, 256], layout)
    return stages


@gluon.jit
def _load_chunks(desc, chunk, arrived, scales):
    if len(scales.shape) == 1:
        tma_load(desc, [chunk * CHUNK], arrived, scales)
    else:
        tma_load(desc, [chunk * LINES, 0], arrived, scales)


@aggregate
class ScaledRows(InOrder):
    """Rows of an M-ragged pass, with a chunk of scales for each of their tiles and each step."""

    rows: value  # `Sorted`
    desc: value
    scales: value
    BYTES: gl.constexpr
    GATHERED: gl.constexpr = False

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Load a step."""
        ids = self.rows.load(ids, walk, tile, step, at, stage, arrived)
        _load_chunks(self.desc, tile.m * tile.steps + step, arrived, self.scales.index(stage))
        return ids


@gluon.jit
def scaled_rows(rows, desc, scales):
    """The operand of `rows`, `Sorted`, with the stages of their scales."""
    return ScaledRows(rows, desc, scales, rows.BYTES + CHUNK_BYTES)


@aggregate
class ScaledWeights(InOrder):
    """Weights with scales of mxfp8 in the order of steps and then columns, of each of two HALVES if there are two."""

    weights: value
    desc: value
    scales: value
    num_chunks: value  # of all columns
    BYTES: gl.constexpr
    GATHERED: gl.constexpr = False

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Load a step. Past the last column are scales of the next step or expert, for columns that are not stored."""
        CHUNKS: gl.constexpr = self.scales.shape[1] // LINES
        ids = self.weights.load(ids, walk, tile, step, at, stage, arrived)
        first = tile.expert * tile.steps + step
        if self.weights.HALVES == 2:
            place = [first, 0, tile.n * (CHUNKS // 2 * LINES), 0]
            tma_load(self.desc, place, arrived, self.scales.index(stage))
        else:
            _load_chunks(self.desc, first * self.num_chunks + tile.n * CHUNKS, arrived, self.scales.index(stage))
        return ids


@gluon.jit
def scaled_weights(weights, desc, scales, num_columns):
    """The operand of `weights`, with the stages of their scales."""
    SIZE: gl.constexpr = scales.shape[1] // LINES * CHUNK_BYTES
    return ScaledWeights(weights, desc, scales, gl.cdiv(num_columns, CHUNK), weights.BYTES + SIZE)


@aggregate
class TokenCopies(InOrder):
    """Tiles of token copies, `[tiles, CHUNK, C]` or TRANSPOSED, `[tiles, C, CHUNK]`, with a chunk of scales for CHUNK
    columns. Past the last column, scales are those of the next tile: columns that are not stored.
    """

    desc: value
    stages: value
    scales_desc: value
    scales: value
    num_chunks: value  # of all columns
    SIDE: gl.constexpr
    PARTS: gl.constexpr
    TRANSPOSED: gl.constexpr
    BYTES: gl.constexpr
    GATHERED: gl.constexpr = False

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Load a step."""
        first = walk.column(tile, step, self.SIDE)
        for c in gl.static_range(self.PARTS):
            column = first + c * self.stages.shape[1 if self.TRANSPOSED else 2]
            place = [at, column, 0] if self.TRANSPOSED else [at, 0, column]
            tma_load(self.desc, place, arrived, self.stages.index(stage * self.PARTS + c))
        _load_chunks(self.scales_desc, at * self.num_chunks + first // CHUNK, arrived, self.scales.index(stage))
        return ids


@gluon.jit
def token_copies(
    copies, stages, scales, num_columns, SIDE: gl.constexpr, PARTS: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """The operand; `copies`: descriptors of elements and of scales."""
    COLUMNS: gl.constexpr = PARTS * stages.shape[1 if TRANSPOSED else 2]
    BYTES: gl.constexpr = COLUMNS * CHUNK + COLUMNS // CHUNK * CHUNK_BYTES
    num_chunks = gl.cdiv(num_columns, CHUNK)
    return TokenCopies(copies[0], stages, copies[1], scales, num_chunks, SIDE, PARTS, TRANSPOSED, BYTES)
