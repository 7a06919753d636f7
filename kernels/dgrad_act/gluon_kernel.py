"""Pass (3), warp-specialized, for long loads on Hopper and Blackwell: the order of tiles and the equations of
`triton_kernel.py`, by the partitions of `warp_specialized/partitions.py`. Tiles are twice as wide, for fewer loads of
operands: `h` reaches the epilogue by shared memory and takes no registers before.

One more warp loads `h`, subtile by subtile, into slots, a ring for each consumer. The epilogue reads `h` from a slot
into registers and gives the slot back, so that the subtile after next arrives while this one and the next are computed.
`dh` and `a` are stored by TMA from buffers of their own, which are read during the next subtile, or the next tile's
MMAs. No barrier covers the whole block.
"""

from ..device import activation
from ..device.tile_order import zero_padding_at
from ..device.tiles import to_fp32
from ..warp_specialized.gluon_compat import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    tma_load,
    tma_store,
    tma_store_wait,
    value,
)
from ..warp_specialized.partitions import ragged_operands, run
from ..warp_specialized.ring import make_ring, shared_tiles
from ..warp_specialized.subtiles import WithoutBegin, load_for_rows, row_numbers, row_zeros, whole_rows
from ..warp_specialized.walks import row_tiles
from .epilogue import backward

SLOTS = gl.constexpr(2)  # for each consumer


@aggregate
class Slots:
    """Subtiles of `h` in shared memory, each with both halves of a row."""

    h_desc: value
    h: value
    ring: value
    CONSUMERS: gl.constexpr
    ACT: value
    TILE: value

    @gluon.jit
    def load(self, walk):
        """Partition of the warp that loads `h`, for each consumer in turn."""
        HALVES: gl.constexpr = activation.halves(self.ACT)
        SUBTILES: gl.constexpr = self.TILE.SUBTILES
        WIDTH: gl.constexpr = self.TILE.BLOCK_N // SUBTILES * self.ACT.CHANNEL_STEP
        ROWS: gl.constexpr = self.h.shape[1]
        BYTES: gl.constexpr = HALVES * ROWS * WIDTH * self.h.dtype.primitive_bitwidth // 8
        for turn in range(0, walk.turns):
            tile = walk.tile(turn)
            wrap, end, row = tile.place(0)
            for s in range(0, SUBTILES):
                column = tile.n * self.TILE.BLOCK_N * self.ACT.CHANNEL_STEP + s * WIDTH
                for c in gl.static_range(self.CONSUMERS):
                    at = self.ring.acquire(turn * SUBTILES + s, BYTES, c * SLOTS)
                    arrived = self.ring.full.index(at)
                    if HALVES == 2:
                        for half in gl.static_range(2):
                            place = [wrap, end, row + c * ROWS, half, column]
                            tma_load(self.h_desc, place, arrived, self.h.index(2 * at + half))
                    else:
                        tma_load(self.h_desc, [wrap, end, row + c * ROWS, column], arrived, self.h.index(at))


@aggregate
class Epilogue(WithoutBegin):
    """Computes and stores `dh`, the activation and the parts of `dprobs`."""

    slots: value
    probs_ptr: value
    dh_desc: value
    a_desc: value
    partial_ptr: value
    num_rows: value
    out: value  # buffers for stores of both parts of `dh` and of `a`
    ROWS: gl.constexpr  # of a consumer
    ACT: value
    TILE: value

    @gluon.jit
    def write(self, walk, accumulators, acc, i, tile, turn, CONSUMER: gl.constexpr):
        """Finish and store a consumer's part of a tile."""
        ACT: gl.constexpr = self.ACT
        ROWS: gl.constexpr = self.ROWS
        SUBTILES: gl.constexpr = self.TILE.SUBTILES
        HALVES: gl.constexpr = activation.halves(ACT)
        WIDTH: gl.constexpr = self.TILE.BLOCK_N // SUBTILES
        h, ring = self.slots.h, self.slots.ring
        dg_out, dl_out = self.out[0].index(CONSUMER), self.out[1].index(CONSUMER)
        a_out = self.out[2].index(CONSUMER)
        wrap, end, row = tile.place(CONSUMER * ROWS)
        subtiles = accumulators.finish(acc, i, SUBTILES)
        for s in gl.static_range(SUBTILES):
            da_MF, column = accumulators.subtile(subtiles, s, SUBTILES, tile), tile.n * self.TILE.BLOCK_N + s * WIDTH
            if self.probs_ptr is None:
                dprobs_M, probs_M1 = None, None
            elif s == 0:
                row_M, dprobs_M = row_numbers(da_MF, CONSUMER * ROWS), row_zeros(da_MF)
                probs_M1 = load_for_rows(self.probs_ptr + tile.first, da_MF, CONSUMER * ROWS, tile.rows)
            at = ring.wait(turn * SUBTILES + s, CONSUMER * SLOTS)
            if ACT.CHANNEL_STEP == 2:
                joined = gl.reshape(gl.join(da_MF, da_MF), (ROWS, 2 * WIDTH))  # for its layout alone
                g = h.index(at).load(joined.type.layout)
                l = g
            else:
                g = h.index(HALVES * at).load(da_MF.type.layout)
                l = h.index(HALVES * at + HALVES - 1).load(da_MF.type.layout)
            ring.release(at)
            g, l = to_fp32(g), to_fp32(l)
            if ACT.CHANNEL_STEP == 2:
                g, l = gl.split(gl.reshape(g, (ROWS, WIDTH, 2)))
                g = gl.convert_layout(g, da_MF.type.layout, assert_trivial=True)  # the same layout under another name
                l = gl.convert_layout(l, da_MF.type.layout, assert_trivial=True)
            da_MF, act, by_gate, by_linear, dprobs_M = backward(da_MF, g, l, dprobs_M, probs_M1, ACT)
            dg_MF, dl_MF = da_MF * by_gate, da_MF * by_linear
            if ACT.CHANNEL_STEP == 2:
                dg_MF = gl.reshape(gl.join(dg_MF, dl_MF), (ROWS, 2 * WIDTH))
            tma_store_wait(0)
            barrier()
            dg_out.store(dg_MF.to(h.dtype))
            if HALVES == 2:
                dl_out.store(dl_MF.to(h.dtype))
            a_out.store(act.to(a_out.dtype))
            fence_async_shared()
            barrier()
            if HALVES == 2:
                tma_store(self.dh_desc, [wrap, end, row, 0, column], dg_out)
                tma_store(self.dh_desc, [wrap, end, row, 1, column], dl_out)
            else:
                tma_store(self.dh_desc, [wrap, end, row, column * ACT.CHANNEL_STEP], dg_out)
            tma_store(self.a_desc, [wrap, end, row, column], a_out)
        if self.probs_ptr is not None:
            partial_M = self.partial_ptr + tile.n.to(gl.int64) * self.num_rows + tile.first + row_M
            gl.store(partial_M, dprobs_M, mask=row_M < tile.rows)


@gluon.jit(do_not_specialize=["num_rows"])
def grouped_dgrad_act_warp_specialized_kernel(
    dy_desc,
    dy_ptr,
    row_ids_ptr,
    w_desc,
    t_ptr,
    t_desc,
    b_desc,
    probs_ptr,
    h_desc,
    dh_ptr,
    dh_desc,
    a_ptr,
    a_desc,
    partial_ptr,
    tiles_ptr,
    num_experts,
    num_rows,
    num_partials,
    H,
    F,
    rank,
    stride_dy_r,
    stride_h_r,
    stride_a_r,
    ACT: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Pass (3); arguments as in the Triton kernel; the descriptors of `h` and `dh` move halves one by one. `dy` has a
    descriptor, or a pointer if threads gather its rows.
    """
    gl.static_assert(TILE.BLOCK_M == 128)
    HALVES: gl.constexpr = activation.halves(ACT)
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    h = shared_tiles(h_desc.dtype, CONSUMERS * SLOTS * HALVES, ROWS, WIDTH * ACT.CHANNEL_STEP)
    # Allocated apart: the compiler has a barrier between writes to two tiles of one allocation.
    dg_out = shared_tiles(dh_desc.dtype, CONSUMERS, ROWS, WIDTH * ACT.CHANNEL_STEP)
    dl_out = shared_tiles(dh_desc.dtype, CONSUMERS, ROWS, WIDTH) if HALVES == 2 else dg_out
    out = (dg_out, dl_out, shared_tiles(a_desc.dtype, CONSUMERS, ROWS, WIDTH))
    slots = Slots(h_desc, h, make_ring(SLOTS, 1, 0, CONSUMERS), CONSUMERS, ACT, TILE)
    walk = row_tiles(tiles_ptr, F, H, TILE, False, rank)
    dy, w = (dy_desc, None, (dy_ptr, stride_dy_r, row_ids_ptr, H)), (w_desc, None, num_experts, F)
    adapter = (t_ptr, t_desc, b_desc, rank)
    left, right, ring, accumulators = ragged_operands(
        dy, w, adapter, REVERSED, K_CONTIGUOUS, 1, TILE.BLOCK_N, CONSUMERS, 1, TILE
    )
    epilogue = Epilogue(slots, probs_ptr, dh_desc, a_desc, partial_ptr, num_rows, out, ROWS, ACT, TILE)
    run(walk, left, right, ring, accumulators, epilogue, CONSUMERS, slots)
    row_M1, column_1N = whole_rows(TILE.BLOCK_M)
    zero_padding_at(dh_ptr, tiles_ptr, 2 * F if ACT.GATED else F, stride_h_r, 1, row_M1, column_1N)
    zero_padding_at(a_ptr, tiles_ptr, F, stride_a_r, 1, row_M1, column_1N)
    if probs_ptr is not None:
        zero_padding_at(partial_ptr, tiles_ptr, num_partials, 1, num_rows, row_M1, column_1N)
