"""Epilogue of wgrad: a finished fp32 tile is added to `dw` or stored, in column subtiles, rounded once.

One subtile after another needs few registers for old values and little shared memory for stores by a descriptor.
"""

import triton
import triton.language as tl

from ..device.tiles import INTERPRETED, column_subtiles, round_to


@triton.jit
def add_to_descriptor(dw_desc, expert, n, k, acc_NK, ACCUMULATE: tl.constexpr, SUBTILES: tl.constexpr):
    """`dw[expert, n:, k:] (+)= acc`; the hardware drops elements outside of `dw`."""
    WIDTH: tl.constexpr = acc_NK.shape[1] // SUBTILES
    subtiles = column_subtiles(acc_NK, SUBTILES)
    for s in tl.static_range(SUBTILES):
        at = [expert, n, k + s * WIDTH]
        tile = tl.reshape(subtiles[s], (1, acc_NK.shape[0], WIDTH))
        # The reduce-add needs no registers for the old values. Not for 16 bits, which must round once, from fp32.
        if ACCUMULATE and dw_desc.dtype == tl.float32 and not INTERPRETED:
            dw_desc.atomic_add(at, tile)
        else:
            if ACCUMULATE:
                tile += dw_desc.load(at).to(tl.float32)
            dw_desc.store(at, round_to(tile, dw_desc.dtype))


@triton.jit
def add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE: tl.constexpr, SUBTILES: tl.constexpr):
    """`dw[n:, k:] (+)= acc` of the expert whose tensor starts at `dw`."""
    WIDTH: tl.constexpr = acc_NK.shape[1] // SUBTILES
    row_N1 = (n + tl.arange(0, acc_NK.shape[0]))[:, None]
    subtiles = column_subtiles(acc_NK, SUBTILES)
    for s in tl.static_range(SUBTILES):
        column_1K = (k + s * WIDTH + tl.arange(0, WIDTH))[None, :]
        add_at(dw, row_N1, column_1K, subtiles[s], N, K, stride_dw_n, stride_dw_k, ACCUMULATE)


@triton.jit
def add_at(dw, row_N1, column_1K, tile_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE: tl.constexpr):
    """`dw[row, column] (+)= tile` for the elements that exist."""
    mask = (row_N1 < N) & (column_1K < K)
    at = dw + row_N1.to(tl.int64) * stride_dw_n + column_1K.to(tl.int64) * stride_dw_k
    if ACCUMULATE:
        tile_NK += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, round_to(tile_NK, dw.dtype.element_ty), mask=mask)
