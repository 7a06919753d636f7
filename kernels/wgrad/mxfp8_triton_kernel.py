"""wgrad of token copies in 8 bits (recipe mxfp8) by pointers, where `tl.dot_scaled` is `mma.sync` or MFMA: the tiles of
`triton_kernel.py`, in the same order, added to `dw` in the same way.

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
def _load_chunk(copy, t, chunk, num_columns, BY_WORDS: tl.constexpr):
    """`(elements [128 columns, 128 tokens], scales [128 columns, 4])` of a chunk of a token copy's tile t.

    `mma.sync` takes four tokens of a column as a word of a register. BY_WORDS: threads load the same columns of four
    neighbouring tokens and make words of them, before shared memory; from a tile as it lies, Triton would read each
    byte by itself. MFMA's operands come transposed from LDS.
    """
    elements_ptr, scales_ptr = copy
    column_C1 = (chunk * CHUNK + tl.arange(0, CHUNK))[:, None]
    mask_C1 = column_C1 < num_columns
    at_C1 = elements_ptr + t.to(tl.int64) * CHUNK * num_columns + column_C1
    if BY_WORDS:
        at_CT = at_C1 + 4 * tl.arange(0, CHUNK // 4)[None, :] * num_columns
        token_0 = tl.load(at_CT, mask=mask_C1, other=0.0)
        token_1 = tl.load(at_CT + num_columns, mask=mask_C1, other=0.0)
        token_2 = tl.load(at_CT + 2 * num_columns, mask=mask_C1, other=0.0)
        token_3 = tl.load(at_CT + 3 * num_columns, mask=mask_C1, other=0.0)
        words = tl.join(tl.join(token_0, token_2), tl.join(token_1, token_3))
        elements = tl.reshape(words, (CHUNK, CHUNK))
    else:
        elements = tl.load(at_C1 + tl.arange(0, CHUNK)[None, :] * num_columns, mask=mask_C1, other=0.0)
    return elements, load_scales(scales_ptr, t * tl.cdiv(num_columns, CHUNK) + chunk)


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
    # Tiles and steps are the chunks that share 512 bytes of scales.
    tl.static_assert(TILE.BLOCK_M == CHUNK)
    tl.static_assert(TILE.BLOCK_N == CHUNK)
    tl.static_assert(TILE.BLOCK_K == CHUNK)
    left, right = (left_ptr, left_scales_ptr), (right_ptr, right_scales_ptr)
    num_n, num_k = tl.cdiv(N, CHUNK), tl.cdiv(K, CHUNK)
    # Experts without rows come last; nothing is added to their gradients.
    num_used = tl.load(order_ptr + num_experts) if ACCUMULATE else num_experts
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in tl.range(0, num_turns(num_used * num_n * num_k, program, programs)):
        rank, n_tile, k_tile = wgrad_tile(tile_index_at(turn, program, programs), num_n, num_k, TILE.GROUP_M)
        expert = tl.load(order_ptr + rank)
        first = tl.load(steps_ptr + expert)
        steps = tl.load(steps_ptr + expert + 1) - first
        tile_ptr = steps_ptr + num_experts + 1 + first
        acc_NK = zeros(CHUNK, CHUNK, steps, False)
        t = tl.load(tile_ptr)  # read one step ahead: loads that give addresses are not pipelined
        for step in range(0, steps):
            left_NR, left_scales = _load_chunk(left, t, n_tile, N, BY_WORDS)
            right_KR, right_scales = _load_chunk(right, t, k_tile, K, BY_WORDS)
            acc_NK = dot_scaled(left_NR, left_scales, tl.trans(right_KR), right_scales, acc_NK)
            t = tl.load(tile_ptr + tl.minimum(step + 1, steps - 1))
        dw = expert_base(dw_ptr, dw_table_ptr, stride_dw_e, expert, DW_ALIGNED)
        n, k = n_tile * CHUNK, k_tile * CHUNK
        add_to_pointers(dw, n, k, acc_NK, N, K, stride_dw_n, stride_dw_k, ACCUMULATE, TILE.SUBTILES)
