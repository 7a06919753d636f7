"""wgrad of token copies in 8 bits (recipe mxfp8) by pointers, where Triton has `tl.dot_scaled` by `mma.sync` or MFMA: the
tiles of `triton_kernel.py`, in the same order, added to `dw` in the same way.

A step is a tile of 128 tokens of one expert, `[tiles, 128, C]`; after the last token of an expert they are zeros. Each
column of an operand has a scale for 32 tokens.
"""

import triton
import triton.language as tl

from ..device.scaled_product import CHUNK, dot_scaled, load_scales
from ..device.tile_order import num_turns, tile_index_at, wgrad_tile
from ..device.tiles import expert_base, zeros
from .epilogue import add_to_pointers


@triton.jit
def _load_columns(copy, t, column, num_columns, BLOCK: tl.constexpr):
    """`(elements [128, BLOCK], scales [BLOCK, 4])` of a token copy's tile t, from a column on."""
    elements_ptr, scales_ptr = copy
    row_R1 = (t.to(tl.int64) * CHUNK + tl.arange(0, CHUNK))[:, None]
    column_1C = (column + tl.arange(0, BLOCK))[None, :]
    elements = tl.load(elements_ptr + row_R1 * num_columns + column_1C, mask=column_1C < num_columns, other=0.0)
    chunk = t * tl.cdiv(num_columns, CHUNK) + column // CHUNK
    return elements, load_scales(scales_ptr, chunk, column % CHUNK, BLOCK)


@triton.jit(do_not_specialize=["num_experts"])
def _grouped_wgrad_mxfp8_triton_kernel(
    left_ptr,
    left_scales_ptr,
    right_ptr,
    right_scales_ptr,
    dw_ptr,
    dw_table_ptr,
    steps_ptr,
    order_ptr,
    num_experts,
    N,
    K,
    stride_dw_e,
    stride_dw_n,
    stride_dw_k,
    ACCUMULATE: tl.constexpr,
    DW_ALIGNED: tl.constexpr,  # every expert's address is a multiple of 16 bytes
    TILE: tl.constexpr,
):
    """`left` `[tiles, 128, N]` and `right` `[tiles, 128, K]` e4m3; scales E8M0, `[tiles, ceil(N / 128), 512]` and
    `[tiles, ceil(K / 128), 512]`; `steps` and `order`: `TokenTiles`; other arguments as in the kernel of 16 bits.
    """
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    tl.static_assert(TILE.BLOCK_M == CHUNK)
    tl.static_assert(CHUNK % BLOCK_N == 0)
    tl.static_assert(CHUNK % BLOCK_K == 0)
    left, right = (left_ptr, left_scales_ptr), (right_ptr, right_scales_ptr)
    num_n, num_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    # Experts without rows come last; nothing is added to their gradients.
    num_used = tl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in tl.range(0, num_turns(num_used * num_n * num_k, program, programs)):
        rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        expert = tl.load(order_ptr + rank)
        n, k = n_tile * BLOCK_N, k_tile * BLOCK_K
        first = tl.load(steps_ptr + expert)
        steps = tl.load(steps_ptr + expert + 1) - first
        tile_ptr = steps_ptr + num_experts + 1 + first
        acc_NK = zeros(BLOCK_N, BLOCK_K, steps, False)
        t = tl.load(tile_ptr)  # read one step ahead: loads that give addresses are not pipelined
        for step in range(0, steps):
            left_RN, left_scales = _load_columns(left, t, n, N, BLOCK_N)
            right_RK, right_scales = _load_columns(right, t, k, K, BLOCK_K)
            acc_NK = dot_scaled(tl.trans(left_RN), left_scales, right_RK, right_scales, acc_NK)
            t = tl.load(tile_ptr + tl.minimum(step + 1, steps - 1))
        dw = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert, DW_ALIGNED)
        add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, TILE.SUBTILES)
