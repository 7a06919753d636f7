"""Launch the activation between 8-bit GEMMs, forward and backward: see `triton_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..device import activation
from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands.arrays import Array, itemsize
from ..operands.quantized import CHUNK, TILE_ROWS, Quantized
from ..routing.plan import Schedule
from ..tiles.rounding import cdiv
from ..tiles.table import Recipe
from ..warp_specialized import stages
from .triton_kernel import _act_quantize_kernel, _dgrad_act_quantize_kernel

# Rows and columns of `a` that a program holds, and warps. Backward's columns divide F; in fp8_block they are a chunk,
# which `gluon_kernel.py` relies on.
_FORWARD: dict[Recipe, tuple[int, int, int]] = {"fp8_block": (64, 128, 8), "mxfp8": (128, 64, 4)}
_BACKWARD: dict[Recipe, tuple[int, int, int]] = {"fp8_block": (16, 128, 8), "mxfp8": (128, 32, 16)}


@Launcher
def grouped_act_quantize_(
    builder: Builder,
    a_rows: Quantized,
    h_RG: Array,
    schedule: Schedule,
    act: activation.Options,
    recipe: Recipe,
    *,
    probs_R: Array | None = None,
) -> None:
    """Writes all that experts own of the row copy of `a = act(h) * probs`, `[R, F]`; F is a multiple of the
    recipe's blocks. `h` has unit column stride.

    For a row of swiglu it moves 5 F bytes, and F / 32 of scales: 4 F of `h`, and F of the copy.
    """
    F = a_rows.elements.shape[1]
    block_r, columns, num_warps = _FORWARD[recipe]
    num_f, num_tiles = cdiv(F, CHUNK) * (CHUNK // columns), schedule.max_tiles(TILE_ROWS)
    if not num_tiles * F:
        return
    arguments = {
        "h_ptr": h_RG,
        "probs_ptr": probs_R,
        "copy_ptr": a_rows.elements,
        "scales_ptr": a_rows.scales,
        "tiles_ptr": schedule.tiles(builder, TILE_ROWS),
        "num_f": num_f,
        "F": F,
        "stride_h_r": h_RG.strides[0],
        "ACT": act,
        "RECIPE": recipe,
        "BLOCK_R": block_r,
        "BLOCK_F": columns,
    }
    sizes: dict[str, Any] = {"F": F, "itemsize": h_RG.dtype.itemsize, "probs": itemsize(probs_R)}
    costs = partial(cost.act_quantize, **sizes, gated=act.GATED)
    grid = (num_tiles * num_f * (TILE_ROWS // block_r),)
    builder.launch(_act_quantize_kernel, grid, arguments, cost=costs, num_warps=num_warps)


@Launcher
def grouped_dgrad_act_quantize_(
    builder: Builder,
    dh_rows: Quantized | None,
    dh_tokens: Quantized | None,
    a_tokens: Quantized | None,
    d_RF: Array,
    h_RG: Array,
    schedule: Schedule,
    act: activation.Options,
    recipe: Recipe,
    *,
    probs_R: Array | None = None,
    dh_RG: Array | None = None,
    a_RF: Array | None = None,
    num_others: int = 0,
) -> Array | None:
    """Writes all that experts own of a row copy and a token copy of `dh`, and of a token copy of `a`; returns None or
    fp32 partial sums of `dprobs`, `[num_partials, R]`, zero at padding rows, which `gemm/dprobs.py` adds up. The last
    `num_others` of them are the caller's to write, at owned rows.

    `d`, the gradient of `a`, has the dtype of `h`: layers round it before they use it, so the GEMM may store it. `dh`
    and `a` in that dtype, contiguous, are written where given, zeros at padding rows: for gradients of a bias, and of
    weights in 16 bits. `d` and `h` have unit column stride. F is a multiple of the recipe's blocks.

    For a row of swiglu it moves 11 F bytes, and 5 F / 32 of scales: 6 F of `d` and `h`, 4 F of the copies of `dh`, and
    F of the copy of `a`.
    """
    (num_rows, F), G = d_RF.shape, h_RG.shape[1]
    block_r, columns, num_warps = _BACKWARD[recipe]
    columns = min(columns, CHUNK // act.CHANNEL_STEP)  # those of dh are in one chunk
    # Programs of a tile cover the last chunks of a, and of dh, whose second half begins at F.
    num_f = cdiv(max(cdiv(F, CHUNK) * CHUNK, cdiv(G, CHUNK) * CHUNK - F), columns)
    num_tiles = schedule.max_tiles(TILE_ROWS)
    partial_PR = None if probs_R is None else builder.empty((F // columns + num_others, num_rows), torch.float32)
    if not num_tiles * F:
        return partial_PR
    arguments: dict[str, Any] = {
        "d_ptr": d_RF,
        "h_ptr": h_RG,
        "probs_ptr": probs_R,
        "dh_row_copy_ptr": dh_rows and dh_rows.elements,
        "dh_row_scales_ptr": dh_rows and dh_rows.scales,
        "dh_token_copy_ptr": dh_tokens and dh_tokens.elements,
        "dh_token_scales_ptr": dh_tokens and dh_tokens.scales,
        "dh_ptr": dh_RG,
        "a_token_copy_ptr": a_tokens and a_tokens.elements,
        "a_token_scales_ptr": a_tokens and a_tokens.scales,
        "a_ptr": a_RF,
        "partial_ptr": partial_PR,
        "tiles_ptr": schedule.tiles(builder, TILE_ROWS),
        "num_f": num_f,
        "num_partials": F // columns + num_others,
        "num_rows": num_rows,
        "F": F,
        "stride_d_r": d_RF.strides[0],
        "stride_h_r": h_RG.strides[0],
        "ACT": act,
    }
    sizes: dict[str, Any] = {"F": F, "itemsize": h_RG.dtype.itemsize, "probs": itemsize(probs_R)}
    written: dict[str, Any] = {
        "dh_rows": dh_rows is not None,
        "dh_tokens": dh_tokens is not None,
        "a_tokens": a_tokens is not None,
        "dh": dh_RG is not None,
        "a": a_RF is not None,
    }
    costs = partial(cost.dgrad_act_quantize, **sizes, gated=act.GATED, **written)
    if stages(builder.target, recipe, (d_RF, h_RG)):
        from .gluon_kernel import _dgrad_act_quantize_kernel as staged_kernel

        builder.launch(staged_kernel, (num_tiles * num_f,), arguments, cost=costs, num_warps=8)
        return partial_PR
    arguments |= {"RECIPE": recipe, "BLOCK_R": block_r, "BLOCK_F": columns}
    builder.launch(_dgrad_act_quantize_kernel, (num_tiles * num_f,), arguments, cost=costs, num_warps=num_warps)
    return partial_PR
