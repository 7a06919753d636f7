"""The tiles of a program, in order, and the steps of a tile. All partitions of a program walk through the same ones."""

from triton.tools.ragged_tma import to_ragged_indices

from ..device.tile_order import load_step, load_tile, num_turns, tile_at, tile_index_at, wgrad_tile
from .gluon_compat import aggregate, gl, gluon, value


@aggregate
class RowTile:
    """Rows of an expert, from `first` on, by columns; `rows` are left of the expert there."""

    expert: value
    first: value
    rows: value
    steps: value
    m: value
    n: value

    @gluon.jit
    def place(self, row):
        """Ragged indices of a row of the tile."""
        return to_ragged_indices(self.first, self.rows, row)


@aggregate
class RowTiles:
    """Tiles of an M-ragged pass, whose steps go along the columns of `x`.

    EARLY: whether a consumer looks a tile up before its MMAs, not behind them. All tiles have as many steps.
    """

    tiles_ptr: value
    turns: value
    num_m: value
    num_n: value
    steps: value
    GROUP: gl.constexpr
    DEPTH: gl.constexpr  # columns of a step
    EARLY: gl.constexpr
    LISTED: gl.constexpr = False
    THROUGH_ROWS: gl.constexpr = False

    @gluon.jit
    def tile(self, turn):
        """Look up the tile that this program takes in a turn."""
        m, n = tile_at(gl.program_id(0) + turn * gl.num_programs(0), self.num_m, self.num_n, self.GROUP)
        expert, first, rows = load_tile(self.tiles_ptr, m)
        return RowTile(expert, first, rows, self.steps, m, n)

    @gluon.jit
    def step(self, tile, step):
        """Where the rows of a step are: ragged indices."""
        return tile.place(0)

    @gluon.jit
    def column(self, tile, step, SIDE: gl.constexpr):
        """First column of a step."""
        return step * self.DEPTH


@gluon.jit
def row_tiles(tiles_ptr, N, K, TILE: gl.constexpr, EARLY: gl.constexpr = False, rank=None):
    """Tiles of all rows by N columns, with K columns of `x`, K > 0, and then `rank` columns of an adapter."""
    num_m, num_n = gl.load(tiles_ptr), gl.cdiv(N, TILE.BLOCK_N)
    turns = gl.cdiv(num_m * num_n - gl.program_id(0), gl.num_programs(0))
    steps = gl.cdiv(K, TILE.BLOCK_K)
    if rank is not None:
        steps += gl.cdiv(rank, TILE.BLOCK_K)
    return RowTiles(tiles_ptr, turns, num_m, num_n, steps, TILE.GROUP_M, TILE.BLOCK_K, EARLY)


@aggregate
class ExpertTile:
    """Tile (n, k) of an expert's `dw`; its rows from `first` on or, where steps are listed, its steps."""

    expert: value
    first: value
    rows: value
    steps: value
    n: value
    k: value


@aggregate
class ExpertTiles:
    """Tiles of wgrad, whose steps go through the rows of an expert.

    Steps are BLOCK_R rows each of one segment or LISTED: after the first steps `[E + 1]`, tiles of token copies or,
    with `segments`, places in segments (`wgrad/steps.py`). The producer looks up a listed step while the one before is
    loaded.
    """

    turns: value
    num_n: value
    num_k: value
    order_ptr: value
    firsts_ptr: value  # [E + 1] first rows or, where steps are listed, first steps
    segments_ptr: value
    num_segments: value
    num_experts: value
    BLOCK_R: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    GROUP: gl.constexpr
    LISTED: gl.constexpr
    EARLY: gl.constexpr = True  # the number of steps depends on the expert
    THROUGH_ROWS: gl.constexpr = True

    @gluon.jit
    def tile(self, turn):
        """Look up the tile that this program takes in a turn.

        An expert without rows has one empty step, which writes zeros; `wgrad/steps.py` lists it.
        """
        index = tile_index_at(turn, gl.program_id(0), gl.num_programs(0))
        rank, n, k = wgrad_tile(index, self.num_n, self.num_k, self.GROUP)
        expert = gl.load(self.order_ptr + rank)
        first = gl.load(self.firsts_ptr + expert)
        rows = gl.load(self.firsts_ptr + expert + 1) - first
        steps = rows
        if not self.LISTED:
            steps = gl.maximum(gl.cdiv(rows, self.BLOCK_R), 1)
        return ExpertTile(expert, first, rows, steps, n, k)

    @gluon.jit
    def step(self, tile, step):
        """Where the rows of a step are: ragged indices; `load_step`; or the number of a tile of token copies."""
        if not self.LISTED:
            found = to_ragged_indices(tile.first, tile.rows, step * self.BLOCK_R)
        elif self.segments_ptr is not None:
            at = tile.first + step
            found = load_step(self.firsts_ptr, self.segments_ptr, at, self.num_segments, self.num_experts)
        else:
            found = gl.load(self.firsts_ptr + self.num_experts + 1 + tile.first + step)
        return found

    @gluon.jit
    def column(self, tile, step, SIDE: gl.constexpr):
        """First column of the left (0) or the right (1) operand."""
        return tile.n * self.BLOCK_N if SIDE == 0 else tile.k * self.BLOCK_K


@gluon.jit
def expert_tiles(
    order_ptr,
    firsts_ptr,
    segments_ptr,
    num_segments,
    num_experts,
    N,
    K,
    LISTED: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Tiles of `dw` `[E, N, K]`; if it is added to, of experts that have rows. LISTED: whether steps are listed."""
    num_n, num_k = gl.cdiv(N, TILE.BLOCK_N), gl.cdiv(K, TILE.BLOCK_K)
    num_used = gl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
    turns = num_turns(num_used * num_n * num_k, gl.program_id(0), gl.num_programs(0))
    tables = (order_ptr, firsts_ptr, segments_ptr, num_segments, num_experts)
    return ExpertTiles(turns, num_n, num_k, *tables, TILE.BLOCK_M, TILE.BLOCK_N, TILE.BLOCK_K, TILE.GROUP_M, LISTED)
