"""Epilogues of wgrad's warp-specialized kernels: how a consumer's part of a finished tile gets into `dw`."""

from ..device.tiles import expert_base
from ..warp_specialized.gluon_compat import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    value,
)
from ..warp_specialized.ring import mbarriers, shared_tiles
from ..warp_specialized.subtiles import WithoutBegin, column_numbers, overwrite, row_numbers, spread_by_rows
from .epilogue import add_at

BUFFERS = gl.constexpr(2)  # for each consumer, for subtiles that are being stored, in turn


@aggregate
class Epilogue(WithoutBegin):
    """Adds subtiles to `dw`, or overwrites it, by TMA or, without a descriptor, by threads."""

    dw: value  # (pointer, table, descriptor, N, K, stride of experts, of rows, of columns)
    num_experts: value
    out: value  # buffers, if `dw` has a descriptor
    ACCUMULATE: gl.constexpr
    REVERSED: gl.constexpr
    DW_ALIGNED: gl.constexpr
    CONSUMERS: gl.constexpr
    TILE: value

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Finish and store a consumer's part of a tile."""
        dw_ptr, dw_table_ptr, dw_desc, N, K, stride_dw_e, stride_dw_n, stride_dw_k = self.dw
        SUBTILES: gl.constexpr = self.TILE.SUBTILES
        n = tile.n * self.TILE.BLOCK_N + CONSUMER * (self.TILE.BLOCK_N // self.CONSUMERS)
        subtiles = accumulators.finish(acc, i, SUBTILES)
        for s in gl.static_range(SUBTILES):
            k = tile.k * self.TILE.BLOCK_K + s * (self.TILE.BLOCK_K // SUBTILES)
            tile_NK = accumulators.subtile(subtiles, s, SUBTILES, tile)
            if dw_desc is not None:
                buffer = self.out.index(CONSUMER * BUFFERS + s % BUFFERS)
                overwrite(buffer, tile_NK.to(self.out.dtype), BUFFERS - 1)
                at = [self.num_experts - 1 - tile.expert if self.REVERSED else tile.expert, n, k]
                if self.ACCUMULATE:
                    tma_add(dw_desc, at, buffer)
                else:
                    tma_store(dw_desc, at, buffer)
            else:
                if self.CONSUMERS == 1:
                    tile_NK = spread_by_rows(tile_NK)
                row_N1, column_1K = row_numbers(tile_NK, n)[:, None], column_numbers(tile_NK, k)
                base = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, tile.expert, self.DW_ALIGNED)
                add_at(base, row_N1, column_1K, tile_NK, N, K, stride_dw_n, stride_dw_k, self.ACCUMULATE)


@gluon.jit
def make_epilogue(
    dw,
    num_experts,
    unused,
    ACCUMULATE: gl.constexpr,
    REVERSED: gl.constexpr,
    DW_ALIGNED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """The epilogue, with its buffers. `unused` stands for them where there are none: a partition takes None only if it
    is an argument of the kernel.
    """
    gl.static_assert(TILE.SUBTILES % BUFFERS == 0)  # so every tile begins with buffer 0
    out = unused
    if dw[2] is not None:
        ROWS: gl.constexpr = TILE.BLOCK_N // CONSUMERS
        out = shared_tiles(dw[2].dtype, CONSUMERS * BUFFERS, ROWS, TILE.BLOCK_K // TILE.SUBTILES)
    return Epilogue(dw, num_experts, out, ACCUMULATE, REVERSED, DW_ALIGNED, CONSUMERS, TILE)


@gluon.jit
def _spread_rows(tile):
    """Rows in the order 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, ...

    Half a warp accesses 32 bytes of each of four neighbouring rows at once. In this order TMA's swizzle puts them into
    different banks; in the order of rows, those of two rows would be in the same ones.
    """
    M: gl.constexpr = tile.shape[0]
    W: gl.constexpr = tile.shape[1]
    return gl.reshape(gl.permute(gl.reshape(tile, (M // 8, 2, 4, W)), (0, 2, 1, 3)), (M, W))


@aggregate
class AheadEpilogue:
    """Adds subtiles to those of `dw`, which TMA has loaded into slots of shared memory while the MMAs ran, and stores
    the sums from there. When TMA itself adds, it reads `dw` only when a subtile is stored.

    Each consumer loads and stores its own SLOTS slots. It loads one again when the store from it has been read, LAG
    subtiles later. So it waits for loads alone that it has begun itself, after its own stores: no wait is for ever.
    """

    dw_desc: value  # `[E, N / 8, 4, 2, K]`, with rows as `_spread_rows` orders them
    num_experts: value
    slots: value
    arrived: value  # mbarriers
    REVERSED: gl.constexpr
    TILE: value

    @gluon.jit
    def _place(self, tile, S: gl.constexpr, CONSUMER: gl.constexpr):
        expert = self.num_experts - 1 - tile.expert if self.REVERSED else tile.expert
        n = tile.n * self.TILE.BLOCK_N + CONSUMER * self.slots.shape[1]
        return expert, n // 8, tile.k * self.TILE.BLOCK_K + S * self.slots.shape[2]

    @gluon.jit
    def _load(self, tile, S: gl.constexpr, CONSUMER: gl.constexpr, pred=True):
        """Begin to load subtile S of a tile into its slot."""
        BYTES: gl.constexpr = self.slots.shape[1] * self.slots.shape[2] * 4
        SLOTS: gl.constexpr = self.TILE.SLOTS
        at = CONSUMER * SLOTS + S % SLOTS
        expert, n_8, k = self._place(tile, S, CONSUMER)
        mbarrier.expect(self.arrived.index(at), BYTES, pred=pred)
        tma_load(self.dw_desc, [expert, n_8, 0, 0, k], self.arrived.index(at), self.slots.index(at), pred=pred)

    @gluon.jit
    def begin(self, walk, CONSUMER: gl.constexpr):
        """Fill the slots for the first tile."""
        SLOTS: gl.constexpr = self.TILE.SLOTS
        tile = walk.tile(0)
        for s in gl.static_range(SLOTS):
            self._load(tile, s, CONSUMER, walk.turns > 0)

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Finish a consumer's part of a tile, add, store, and fill the slots for the next tile."""
        SUBTILES: gl.constexpr = self.TILE.SUBTILES
        SLOTS: gl.constexpr = self.TILE.SLOTS
        LAG: gl.constexpr = SLOTS // 2
        gl.static_assert(SUBTILES % SLOTS == 0)
        following, more = walk.tile(gl.minimum(turn + 1, walk.turns - 1)), turn + 1 < walk.turns
        subtiles = accumulators.finish(acc, i, SUBTILES)
        for s in gl.static_range(SUBTILES + LAG):
            if s < SUBTILES:
                at = CONSUMER * SLOTS + s % SLOTS
                tile_NK = _spread_rows(accumulators.subtile(subtiles, s, SUBTILES, tile))
                mbarrier.wait(self.arrived.index(at), turn * (SUBTILES // SLOTS) + s // SLOTS & 1)
                slot = self.slots.index(at)
                slot.store(slot.load(tile_NK.type.layout) + tile_NK)
                fence_async_shared()
                barrier()
                expert, n_8, k = self._place(tile, s, CONSUMER)
                tma_store(self.dw_desc, [expert, n_8, 0, 0, k], slot)
            if s >= LAG:
                tma_store_wait(min(LAG, SUBTILES + LAG - 1 - s))
                if s - LAG + SLOTS < SUBTILES:
                    self._load(tile, s - LAG + SLOTS, CONSUMER)
                else:
                    self._load(following, s - LAG + SLOTS - SUBTILES, CONSUMER, more)


@gluon.jit
def make_ahead_epilogue(dw_desc, num_experts, REVERSED: gl.constexpr, CONSUMERS: gl.constexpr, TILE: gl.constexpr):
    """The epilogue with its slots."""
    COUNT: gl.constexpr = CONSUMERS * TILE.SLOTS
    slots = shared_tiles(dw_desc.dtype, COUNT, TILE.BLOCK_N // CONSUMERS, TILE.BLOCK_K // TILE.SUBTILES)
    arrived = mbarriers(COUNT, 1)
    fence_async_shared()
    return AheadEpilogue(dw_desc, num_experts, slots, arrived, REVERSED, TILE)
