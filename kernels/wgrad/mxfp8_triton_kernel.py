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
def _load_columns(copy, t, column, num_columns, BLOCK: tl.constexpr, BY_WORDS: tl.constexpr):
    """`(elements [BLOCK, 128], scales [BLOCK, 4])` of a token copy's tile t, transposed, from a column on.

    `mma.sync` takes four tokens of a column as one word of a register. Nothing transposes bytes on their way from shared
    memory, so words are put together BY_WORDS before that, from loads of every fourth token; else Triton reads bytes
    one by one. MFMA's come transposed by `ds_read_b64_tr_b8`.
    """
    elements_ptr, scales_ptr = copy
    column_C1 = (column + tl.arange(0, BLOCK))[:, None]
    mask_C1 = column_C1 < num_columns
    elements_C1 = elements_ptr + t.to(tl.int64) * CHUNK * num_columns + column_C1
    if BY_WORDS:
        at_C1 = elements_C1 + 4 * tl.arange(0, CHUNK // 4)[None, :] * num_columns
        token_0 = tl.load(at_C1, mask=mask_C1, other=0.0)
        token_1 = tl.load(at_C1 + num_columns, mask=mask_C1, other=0.0)
        token_2 = tl.load(at_C1 + 2 * num_columns, mask=mask_C1, other=0.0)
        token_3 = tl.load(at_C1 + 3 * num_columns, mask=mask_C1, other=0.0)
        words = tl.join(tl.join(token_0, token_2), tl.join(token_1, token_3))
        elements = tl.reshape(words, (BLOCK, CHUNK))
    else:
        elements = tl.load(elements_C1 + tl.arange(0, CHUNK)[None, :] * num_columns, mask=mask_C1, other=0.0)
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
    BY_WORDS: tl.constexpr,
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
            left_NR, left_scales = _load_columns(left, t, n, N, BLOCK_N, BY_WORDS)
            right_KR, right_scales = _load_columns(right, t, k, K, BLOCK_K, BY_WORDS)
            acc_NK = dot_scaled(left_NR, left_scales, tl.trans(right_KR), right_scales, acc_NK)
            t = tl.load(tile_ptr + tl.minimum(step + 1, steps - 1))
        dw = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert, DW_ALIGNED)
        add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, TILE.SUBTILES)
