"""Operands of a step as the producer loads them: rows in order, rows gathered, weights.

An operand has `begin(walk, tile)`, what it must know before the first step (row ids, if rows are gathered), and
`load(ids, walk, tile, step, at, stage, arrived)`, which loads a step and returns the row ids of the next one. `at`:
where the walk found the rows of the step; `stage`: where the operand goes; `arrived`: the mbarrier of the stage. BYTES
of a step come by TMA. SIDE: 0 for the left operand, 1 for the right one. Where PARTS consumers share an operand, each
has a part of it in `stages`, one after the other: of its rows in an M-ragged pass, of its columns in wgrad.
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import NOWHERE
from .gluon_compat import aggregate, copy_arrive, copy_async, gl, gluon, reinterpreted, tma_gather, tma_load, value


class InOrder:
    """An operand without row ids."""

    @gluon.jit
    def begin(self, walk, tile):
        """Return a number that nothing uses."""
        return tile.first


@aggregate
class Sorted(InOrder):
    """Rows in order, by TMA; in wgrad also those of several segments or, in 8 bits, tiles of token copies."""

    desc: value
    stages: value
    SIDE: gl.constexpr
    PARTS: gl.constexpr
    BYTES: gl.constexpr
    GATHERED: gl.constexpr = False

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Load every consumer's part."""
        column = walk.column(tile, step, self.SIDE)
        for c in gl.static_range(self.PARTS):
            part = self.stages.index(stage * self.PARTS + c)
            if not walk.THROUGH_ROWS:
                wrap, end, row = at
                tma_load(self.desc, [wrap, end, row + c * self.stages.shape[1], column], arrived, part)
            elif walk.segments_ptr is not None:
                row, rows, left_base, right_base = at
                wrap, end, row = to_ragged_indices(row, rows, 0)
                base = (left_base if self.SIDE == 0 else right_base).to(gl.int32)
                tma_load(self.desc, [wrap, end, base, row, column + c * self.stages.shape[2]], arrived, part)
            else:
                wrap, end, row = at
                tma_load(self.desc, [wrap, end, row, column + c * self.stages.shape[2]], arrived, part)
        return ids


@gluon.jit
def _load_row_ids(row_ids_ptr, tile, row, ROWS: gl.constexpr, layout: gl.constexpr):
    """`[ROWS]` ids from a row of the tile on; from `tile.rows` on they are -1."""
    row_M = row + gl.arange(0, ROWS, layout)
    return gl.load(row_ids_ptr + tile.first + row_M, mask=row_M < tile.rows, other=-1)


@aggregate
class GatheredByTma:
    """Rows by an index, which the TMA of Blackwell follows; id -1 reads as zeros. Row ids are read one step ahead."""

    desc: value
    row_ids_ptr: value
    stages: value
    SIDE: gl.constexpr
    BYTES: gl.constexpr
    GATHERED: gl.constexpr = True

    @gluon.jit
    def _ids(self, tile, row):
        # Every thread of a warp has the ids of all rows that the warp loads.
        layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
        return _load_row_ids(self.row_ids_ptr, tile, row, self.stages.shape[1], layout).to(gl.int32)

    @gluon.jit
    def begin(self, walk, tile):
        """Row ids of the first step."""
        return self._ids(tile, 0)

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Load a quarter of the rows by each warp."""
        tma_gather(self.desc, ids, walk.column(tile, step, self.SIDE), arrived, self.stages.index(stage))
        if walk.THROUGH_ROWS:
            ids = self._ids(tile, (step + 1) * self.stages.shape[1])
        return ids


@aggregate
class GatheredByCopies:
    """Rows by an index, which threads copy with `cp.async`, 16 bytes each (Hopper, whose TMA follows no index); zeros
    past an expert's end and past the last column. Each thread arrives at the stage when its copies are done.

    Rows and their stride are multiples of 16 bytes. In wgrad, row ids are read two steps ahead, as one step may take
    less time than the read. Where steps of several segments are listed, places (`wgrad/steps.py`) stand for row ids,
    and `stride` is the elements of a unit.
    """

    ptr: value
    stride: value
    row_ids_ptr: value  # None: rows are in order
    num_columns: value
    stages: value  # every consumer's part, one after the other
    SIDE: gl.constexpr
    BYTES: gl.constexpr = 0
    GATHERED: gl.constexpr = True

    @gluon.jit
    def _ids(self, walk, tile, step):
        """Ids of a step's rows, one for each row that a thread copies; NOWHERE for rows that are zeros."""
        ROWS: gl.constexpr = self.stages.shape[1]
        ACROSS: gl.constexpr = min(8, self.stages.shape[2] // 8)  # threads that copy neighbouring 16 bytes of a row
        layout: gl.constexpr = gl.SliceLayout(
            1, gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
        )
        if walk.LISTED:
            at = (tile.first + gl.minimum(step, tile.steps - 1)).to(gl.int64) * ROWS
            ids = gl.load(self.row_ids_ptr + at + gl.arange(0, ROWS, layout))
        elif self.row_ids_ptr is None:
            row_M = gl.arange(0, ROWS, layout)
            ids = gl.where(row_M < tile.rows, tile.first + row_M, -1)
        else:
            ids = _load_row_ids(self.row_ids_ptr, tile, step * ROWS, ROWS, layout)
        return ids

    @gluon.jit
    def begin(self, walk, tile):
        """Row ids of the first step and, in wgrad, of the second."""
        ids = self._ids(walk, tile, 0)
        return ids, self._ids(walk, tile, 1) if walk.THROUGH_ROWS else ids

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Begin to copy."""
        now, following = ids
        layout: gl.constexpr = now.type.layout.parent
        VECTOR: gl.constexpr = 128 // self.ptr.dtype.element_ty.primitive_bitwidth
        NONE: gl.constexpr = NOWHERE if walk.LISTED else -1
        column_1N = gl.arange(0, self.stages.shape[2], gl.SliceLayout(0, layout))[None, :]
        column_1N += walk.column(tile, step, self.SIDE)
        ids_M1 = now[:, None]
        ptr = self.ptr + ids_M1.to(gl.int64) * (self.stride // VECTOR * VECTOR) + column_1N
        mask = (ids_M1 > NONE) & (column_1N < self.num_columns // VECTOR * VECTOR)
        copy_async(self.stages.index(stage), ptr, mask=mask)
        copy_arrive(arrived, increment_count=False)
        if walk.THROUGH_ROWS:
            now, following = following, self._ids(walk, tile, step + 2)
        return now, following


@gluon.jit
def rows_operand(desc, gather, stages, SIDE: gl.constexpr, PARTS: gl.constexpr, BY_COLUMNS: gl.constexpr):
    """The operand whose rows are in order (`desc`, no row ids), gathered by TMA (`desc`) or copied by threads.

    `gather`: `(pointer, stride, row ids, number of columns)`, None where unused. BY_COLUMNS: how parts are divided.
    """
    ptr, stride, row_ids_ptr, num_columns = gather
    SIZE: gl.constexpr = PARTS * stages.shape[1] * stages.shape[2] * stages.dtype.primitive_bitwidth // 8
    COUNT: gl.constexpr = stages.shape[0] // PARTS
    M: gl.constexpr = stages.shape[1] if BY_COLUMNS else PARTS * stages.shape[1]
    N: gl.constexpr = PARTS * stages.shape[2] if BY_COLUMNS else stages.shape[2]
    if desc is None:
        stages = reinterpreted(stages, [COUNT, M, N])
    return (
        GatheredByCopies(ptr, stride, row_ids_ptr, num_columns, stages, SIDE)
        if desc is None
        else Sorted(desc, stages, SIDE, PARTS, SIZE)
        if row_ids_ptr is None
        else GatheredByTma(desc, row_ids_ptr, stages, SIDE, SIZE)
    )


@aggregate
class Adapted:
    """An operand of an M-ragged pass with an adapter: after `steps` steps of the layer's own come those of the adapter,
    into the same stages.
    """

    own: value
    adapter: value
    steps: value
    BYTES: gl.constexpr
    GATHERED: gl.constexpr

    @gluon.jit
    def begin(self, walk, tile):
        """Return what the layer's own steps need."""
        return self.own.begin(walk, tile)

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Load a step. In M-ragged passes, every step has the same row ids."""
        if step < self.steps:
            self.own.load(ids, walk, tile, step, at, stage, arrived)
        else:
            first = self.adapter.begin(walk, tile)
            self.adapter.load(first, walk, tile, step - self.steps, at, stage, arrived)
        return ids


@aggregate
class Weights(InOrder):
    """Columns of a step of an M-ragged pass, of one expert's `[N, K]` or, of two HALVES, of each half's rows.

    Where N is contiguous, the halves of a stage `[K, N]` lie one after the other, as 128 bytes of columns at a time do.
    """

    desc: value
    num_experts: value
    stages: value
    REVERSED: gl.constexpr  # the descriptor starts at the last expert
    K_CONTIGUOUS: gl.constexpr
    HALVES: gl.constexpr
    BYTES: gl.constexpr
    GATHERED: gl.constexpr = False

    @gluon.jit
    def load(self, ids, walk, tile, step, at, stage, arrived):
        """Load a step."""
        expert = self.num_experts - 1 - tile.expert if self.REVERSED else tile.expert
        n = tile.n * (self.stages.shape[1 if self.K_CONTIGUOUS else 2] // self.HALVES)
        k = walk.column(tile, step, 1)
        if self.HALVES == 2 and not self.K_CONTIGUOUS:
            COUNT: gl.constexpr = 2 * self.stages.shape[0]
            parts = reinterpreted(self.stages, [COUNT, self.stages.shape[1], self.stages.shape[2] // 2])
            for half in gl.static_range(2):
                tma_load(self.desc, [expert, half, k, n], arrived, parts.index(2 * stage + half))
        elif self.HALVES == 2:
            tma_load(self.desc, [expert, 0, n, k], arrived, self.stages.index(stage))
        elif self.K_CONTIGUOUS:
            tma_load(self.desc, [expert, n, k], arrived, self.stages.index(stage))
        else:
            tma_load(self.desc, [expert, k, n], arrived, self.stages.index(stage))
        return ids


@gluon.jit
def weights_operand(
    desc, num_experts, stages, REVERSED: gl.constexpr, K_CONTIGUOUS: gl.constexpr, HALVES: gl.constexpr = 1
):
    """Weights, in the stages of a tile's columns."""
    SIZE: gl.constexpr = stages.shape[1] * stages.shape[2] * stages.dtype.primitive_bitwidth // 8
    return Weights(desc, num_experts, stages, REVERSED, K_CONTIGUOUS, HALVES, SIZE)
