"""How a finished fp32 tile gets into `dw`: added or stored, in column subtiles, rounded once.

Halving the columns until there are SUBTILES tiles keeps what must be alive at once small: registers for old values,
shared memory for what a descriptor stores.
"""

import triton
import triton.language as tl

from .common import INTERPRETED, round_to


@triton.jit
def add_to_descriptor(dw_desc, expert, n, k, acc_NK, ACCUMULATE: tl.constexpr, SUBTILES: tl.constexpr):
    """`dw[expert, n:, k:] (+)= acc`; the hardware drops what lies outside."""
    BLOCK_N: tl.constexpr = acc_NK.shape[0]
    BLOCK_K: tl.constexpr = acc_NK.shape[1]
    if SUBTILES > 1:
        low, high = tl.split(tl.permute(tl.reshape(acc_NK, (BLOCK_N, 2, BLOCK_K // 2)), (0, 2, 1)))
        add_to_descriptor(dw_desc, expert, n, k, low, ACCUMULATE, SUBTILES // 2)
        add_to_descriptor(dw_desc, expert, n, k + BLOCK_K // 2, high, ACCUMULATE, SUBTILES // 2)
    else:
        tile = tl.reshape(acc_NK, (1, BLOCK_N, BLOCK_K))
        # The reduce-add needs no registers for the old values. Not for 16 bits, which must round once, from fp32.
        if ACCUMULATE and dw_desc.dtype == tl.float32 and not INTERPRETED:
            dw_desc.atomic_add([expert, n, k], tile)
        else:
            if ACCUMULATE:
                tile += dw_desc.load([expert, n, k]).to(tl.float32)
            dw_desc.store([expert, n, k], round_to(tile, dw_desc.dtype))


@triton.jit
def add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE: tl.constexpr, SUBTILES: tl.constexpr):
    """`dw[n:, k:] (+)= acc` of the expert whose tensor starts at `dw`."""
    BLOCK_N: tl.constexpr = acc_NK.shape[0]
    BLOCK_K: tl.constexpr = acc_NK.shape[1]
    if SUBTILES > 1:
        low, high = tl.split(tl.permute(tl.reshape(acc_NK, (BLOCK_N, 2, BLOCK_K // 2)), (0, 2, 1)))
        add_to_pointers(dw, n, k, low, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, SUBTILES // 2)
        add_to_pointers(dw, n, k + BLOCK_K // 2, high, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, SUBTILES // 2)
    else:
        rows, columns = n + tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K)
        mask = (rows < N)[:, None] & (columns < K)[None, :]
        at = dw + rows.to(tl.int64)[:, None] * stride_dw_n + columns.to(tl.int64)[None, :] * stride_dw_k
        if ACCUMULATE:
            acc_NK += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, round_to(acc_NK, dw.dtype.element_ty), mask=mask)
