"""Pass (3), warp-specialized, for long loads on Hopper and Blackwell: the order of tiles and the equations of
`triton_kernel.py`. Tiles are twice as wide, for fewer loads of operands: `h` reaches the epilogue by shared memory and
takes no registers before.

One warp loads operands (TMA, `warp_specialized/ring.py`; four where rows are gathered), one loads `h`, subtile by
subtile, into slots; others multiply (`warp_specialized/partitions.py`). The epilogue reads `h` from a slot into
registers and gives the slot back, so that the subtile after next arrives while this one and the next are computed. `dh`
and `a` are stored by TMA from buffers of their own, which are read during the next subtile, or the next tile's MMAs. No
barrier covers the whole block.

Each slot of a consumer has two mbarriers, as a stage has: `full` (its `h` has arrived) and `empty` (it was read).
"""

from triton.tools.ragged_tma import to_ragged_indices

from ..device import activation
from ..device.tile_order import load_tile, tile_at, zero_padding_at
from ..device.tiles import to_fp32
from ..warp_specialized.blackwell import multiply_tiles
from ..warp_specialized.gluon_compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)
from ..warp_specialized.partitions import (
    finished,
    load_operands,
    operands,
    product,
    subtile,
    worker_registers,
    worker_warps,
)
from ..warp_specialized.ring import load_for_rows, mbarriers, row_numbers, row_zeros, shared_tiles, whole_rows
from .epilogue import backward

SLOTS = gl.constexpr(2)  # for each consumer


@gluon.jit
def _load_h(h_desc, tiles_ptr, pipeline, slots, ACT: gl.constexpr, TILE: gl.constexpr):
    """Partition of the warp that loads `h`, for each consumer in turn; `slots`: `(h, full, empty)`."""
    num_m, num_f = pipeline[0], pipeline[1]
    h, full, empty = slots
    HALVES: gl.constexpr = activation.halves(ACT)
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES * ACT.CHANNEL_STEP
    ROWS: gl.constexpr = h.shape[1]
    CONSUMERS: gl.constexpr = empty.shape[0] // SLOTS
    BYTES: gl.constexpr = HALVES * ROWS * WIDTH * h.dtype.primitive_bitwidth // 8
    j = 0
    for tile_index in range(gl.program_id(0), num_m * num_f, gl.num_programs(0)):
        m_tile, f_tile = tile_at(tile_index, num_m, num_f, TILE.GROUP_M)
        _expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, 0)
        for s in range(0, TILE.SUBTILES):
            column = f_tile * TILE.BLOCK_N * ACT.CHANNEL_STEP + s * WIDTH
            for c in gl.static_range(CONSUMERS):
                at = c * SLOTS + j % SLOTS
                mbarrier.wait(empty.index(at), (j // SLOTS & 1) ^ 1)
                mbarrier.expect(full.index(at), BYTES)
                if HALVES == 2:
                    tma_load(h_desc, [wrap, end, row + c * ROWS, 0, column], full.index(at), h.index(2 * at))
                    tma_load(h_desc, [wrap, end, row + c * ROWS, 1, column], full.index(at), h.index(2 * at + 1))
                else:
                    tma_load(h_desc, [wrap, end, row + c * ROWS, column], full.index(at), h.index(at))
            j += 1


@gluon.jit
def _consume(
    arguments,
    pipeline,
    slots,
    out,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ACT: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Partition of a consumer; `slots` as in `_load_h`; `out`: buffers for stores of both parts of `dh` and of `a`."""
    probs_ptr, dh_desc, a_desc, partial_ptr, tiles_ptr, num_rows, H = arguments
    num_m, num_f = pipeline[0], pipeline[1]
    h, full, empty = slots
    SUBTILES: gl.constexpr = TILE.SUBTILES
    HALVES: gl.constexpr = activation.halves(ACT)
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    WIDTH: gl.constexpr = TILE.BLOCK_N // SUBTILES
    dg_out, dl_out, a_out = out[0].index(CONSUMER), out[1].index(CONSUMER), out[2].index(CONSUMER)
    i = 0
    j = 0
    for tile_index in range(gl.program_id(0), num_m * num_f, gl.num_programs(0)):
        acc, i = product(i, H, pipeline, CONSUMER, K_CONTIGUOUS, TILE)
        m_tile, f_tile = tile_at(tile_index, num_m, num_f, TILE.GROUP_M)
        _expert, first, rows = load_tile(tiles_ptr, m_tile)
        wrap, end, row = to_ragged_indices(first, rows, CONSUMER * ROWS)
        subtiles = finished(acc, i, pipeline, SUBTILES, TILE)
        for s in gl.static_range(SUBTILES):
            da_MF, column = subtile(subtiles, s, SUBTILES, CONSUMERS), f_tile * TILE.BLOCK_N + s * WIDTH
            if probs_ptr is None:
                dprobs_M, probs_M1 = None, None
            elif s == 0:
                row_M, dprobs_M = row_numbers(da_MF, CONSUMER * ROWS), row_zeros(da_MF)
                probs_M1 = load_for_rows(probs_ptr + first, da_MF, CONSUMER * ROWS, rows)
            at = CONSUMER * SLOTS + j % SLOTS
            mbarrier.wait(full.index(at), j // SLOTS & 1)
            if ACT.CHANNEL_STEP == 2:
                joined = gl.reshape(gl.join(da_MF, da_MF), (ROWS, 2 * WIDTH))  # for its layout alone
                g = h.index(at).load(joined.type.layout)
                l = g
            else:
                g = h.index(HALVES * at).load(da_MF.type.layout)
                l = h.index(HALVES * at + HALVES - 1).load(da_MF.type.layout)
            mbarrier.arrive(empty.index(at), count=1)
            j += 1
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
                tma_store(dh_desc, [wrap, end, row, 0, column], dg_out)
                tma_store(dh_desc, [wrap, end, row, 1, column], dl_out)
            else:
                tma_store(dh_desc, [wrap, end, row, column * ACT.CHANNEL_STEP], dg_out)
            tma_store(a_desc, [wrap, end, row, column], a_out)
        if probs_ptr is not None:
            partial_M = partial_ptr + f_tile.to(gl.int64) * num_rows + first + row_M
            gl.store(partial_M, dprobs_M, mask=row_M < rows)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def grouped_dgrad_act_warp_specialized_kernel(
    dy_desc,
    row_ids_ptr,
    w_desc,
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
    stride_h_r,
    stride_a_r,
    ACT: gl.constexpr,
    K_CONTIGUOUS: gl.constexpr,
    REVERSED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Pass (3); arguments as in the Triton kernel; the descriptors of `h` and `dh` move halves one by one."""
    gl.static_assert(TILE.BLOCK_M == 128)
    HALVES: gl.constexpr = activation.halves(ACT)
    ROWS: gl.constexpr = TILE.BLOCK_M // CONSUMERS
    WIDTH: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    h = shared_tiles(h_desc.dtype, CONSUMERS * SLOTS * HALVES, ROWS, WIDTH * ACT.CHANNEL_STEP)
    # Allocated apart: the compiler has a barrier between writes to two tiles of one allocation.
    dg_out = shared_tiles(dh_desc.dtype, CONSUMERS, ROWS, WIDTH * ACT.CHANNEL_STEP)
    dl_out = shared_tiles(dh_desc.dtype, CONSUMERS, ROWS, WIDTH) if HALVES == 2 else dg_out
    out = (dg_out, dl_out, shared_tiles(a_desc.dtype, CONSUMERS, ROWS, WIDTH))
    slots = (h, mbarriers(CONSUMERS * SLOTS, 1), mbarriers(CONSUMERS * SLOTS, 1))
    dy, w, full, empty, accumulators = operands(dy_desc.dtype, CONSUMERS, TILE.BLOCK_N, K_CONTIGUOUS, TILE)
    pipeline = (gl.load(tiles_ptr), gl.cdiv(F, TILE.BLOCK_N), dy, w, full, empty, accumulators)
    GATHERED: gl.constexpr = row_ids_ptr is not None
    arguments = (probs_ptr, dh_desc, a_desc, partial_ptr, tiles_ptr, num_rows, H)
    loads = (dy_desc, row_ids_ptr, w_desc, tiles_ptr, num_experts)
    gl.warp_specialize(
        [
            (_consume, (arguments, pipeline, slots, out, gl.constexpr(0), CONSUMERS, ACT, K_CONTIGUOUS, TILE)),
            (_consume, (arguments, pipeline, slots, out, gl.constexpr(1), CONSUMERS, ACT, K_CONTIGUOUS, TILE))
            if CONSUMERS == 2
            else (multiply_tiles, (H, pipeline, K_CONTIGUOUS, TILE)),
            (load_operands, (loads, H, pipeline, REVERSED, K_CONTIGUOUS, 1, TILE)),
            (_load_h, (h_desc, tiles_ptr, pipeline, slots, ACT, TILE)),
        ],
        worker_warps(CONSUMERS, GATHERED, others=1),
        worker_registers(CONSUMERS, GATHERED, others=1),
    )
    row_M1, column_1N = whole_rows(TILE.BLOCK_M)
    zero_padding_at(dh_ptr, tiles_ptr, 2 * F if ACT.GATED else F, stride_h_r, 1, row_M1, column_1N)
    zero_padding_at(a_ptr, tiles_ptr, F, stride_a_r, 1, row_M1, column_1N)
    if probs_ptr is not None:
        zero_padding_at(partial_ptr, tiles_ptr, num_partials, 1, num_rows, row_M1, column_1N)
