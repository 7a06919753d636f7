"""Launch wgrad of token copies in 8 bits: see `gluon_kernel.py` and `mxfp8_triton_kernel.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..device.tile_order import deals_out
from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands import descriptors, expert_tensors
from ..operands.arrays import Array
from ..operands.descriptors import Descriptor
from ..operands.expert_tensors import ExpertTensors
from ..operands.quantized import CHUNK, TILE_ROWS, Quantized
from ..tiles.rounding import cdiv
from ..tiles.select import eight_bit
from ..tiles.table import Recipe
from ..warp_specialized import gluon_missing
from .operands import choose_regime, describe_ahead, describe_dw, tma_rounds_twice
from .token_tiles import plan_token_tiles


@Launcher
def grouped_wgrad_quantized_(
    builder: Builder,
    dw_ENK: ExpertTensors,
    dy: Quantized,
    x: Quantized,
    offsets: Sequence[Array],
    max_tiles: Sequence[int],
    recipe: Recipe,
    *,
    accumulate: bool,
    order: Array | None = None,
) -> None:
    """Add products of token copies of `dy` and `x`, quantized for `recipe`, to `dw`, or write it (zeros for experts
    without rows). See `plan_token_tiles` for `offsets`, `max_tiles` and `order`.

    Raises:
        NotImplementedError: the target has no kernel for the recipe.
        ValueError: there are no tiles, or TMA cannot move the copies.
    """
    target, num_experts, transposed = builder.target, dw_ENK.num_experts, recipe == "fp8_block"  # token copies
    N, K = (copy.elements.shape[1 if transposed else 2] for copy in (dy, x))
    costs = partial(cost.wgrad_quantized, N=N, K=K, grad=dw_ENK.base.dtype.itemsize, accumulate=accumulate)
    left, right = dy, x
    if dw_ENK.strides[0] == 1 != dw_ENK.strides[1]:
        left, right, dw_ENK, N, K = x, dy, dw_ENK.T, K, N
    # About the mean: the bound `max_tiles` counts a tile for each expert and micro-batch beside those that rows fill.
    rows_per_expert = TILE_ROWS * (sum(max_tiles) / num_experts - len(max_tiles))
    regime = choose_regime(target, dw_ENK, (N, K), rows_per_expert, 1, accumulate)
    chosen = eight_bit("wgrad", recipe, target, gluon_missing(), regime)
    tile = chosen.tile
    token_tiles = plan_token_tiles(builder, offsets, max_tiles, num_experts, order)
    tiles = cdiv(N, tile.BLOCK_N) * cdiv(K, tile.BLOCK_K)
    programs = target.num_programs(tile, num_experts * tiles)
    arguments = {
        **expert_tensors.arguments("dw", dw_ENK),
        "steps_ptr": token_tiles.steps,
        "order_ptr": token_tiles.order,
        "num_experts": num_experts,
        "N": N,
        "K": K,
        "stride_dw_n": dw_ENK.strides[0],
        "stride_dw_k": dw_ENK.strides[1],
        "ACCUMULATE": accumulate,
        "DW_ALIGNED": dw_ENK.aligned,
    }
    if chosen.path == "pointer":
        from .mxfp8_triton_kernel import _grouped_wgrad_mxfp8_triton_kernel as kernel

        arguments |= {"left_ptr": left.elements, "left_scales_ptr": left.scales}
        arguments |= {"right_ptr": right.elements, "right_scales_ptr": right.scales}
        arguments["BY_WORDS"] = target.architecture.startswith("sm_")
    else:
        rows = tile.BLOCK_N // target.consumers
        dw_desc = None if accumulate and tma_rounds_twice(dw_ENK) else describe_dw(dw_ENK, (N, K), rows, tile)
        if tile.SLOTS and dw_desc is not None:
            dw_desc = describe_ahead(dw_desc)
        arguments |= {
            "left_desc": _columns(left.elements, rows, transposed),
            "left_scales_desc": descriptors.scale_chunks(left.scales),
            "right_desc": _columns(right.elements, tile.BLOCK_K, transposed),
            "right_scales_desc": descriptors.scale_chunks(right.scales, tile.BLOCK_K // CHUNK),
            "dw_desc": dw_desc,
            "REVERSED": dw_ENK.stride_e < 0,
        }
        if dw_desc is not None:
            arguments["dw_ptr"] = None
        from .gluon_kernel import grouped_wgrad_warp_specialized_kernel as kernel

        pointers = ("left_ptr", "left_row_ids_ptr", "right_ptr", "right_row_ids_ptr", "offsets_ptr", "segments_ptr")
        arguments |= dict.fromkeys((*pointers, "stride_left_r", "stride_right_r")) | {"num_segments": 1}  # of 16 bits
        descriptors.check_fit(arguments)
    grid = (programs if deals_out(tiles, programs) else num_experts * tiles,)
    builder.launch(kernel, grid, arguments, chosen, costs)


def _columns(elements: Array, block: int, transposed: bool) -> Descriptor:
    """Describe a token copy, `[tiles, 128, C]` or transposed, for `block` of its columns in a tile."""
    of_tile = (block, TILE_ROWS) if transposed else (TILE_ROWS, block)
    return Descriptor(elements, elements.shape, elements.strides, (1, *of_tile))
