"""Launch the quantization of a matrix to 8 bits: see `triton_kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..launching import cost
from ..launching.program import Builder
from ..launching.run import Launcher
from ..operands.arrays import Array
from ..operands.quantized import CHUNK, TILE_ROWS, Quantized
from ..routing.plan import Schedule
from ..tiles.rounding import cdiv
from ..tiles.table import Recipe
from ..warp_specialized import stages
from .triton_kernel import _quantize_kernel

# Columns of a program, one chunk or half of one, and warps. Two to five programs share a multiprocessor, so that one
# loads while another one stores.
_SIZES: dict[Recipe, tuple[int, int]] = {"fp8_block": (128, 8), "mxfp8": (64, 4)}


@Launcher
def grouped_quantize_(
    builder: Builder,
    row_copy: Quantized | None,
    token_copy: Quantized | None,
    x_RC: Array,
    schedule: Schedule,
    recipe: Recipe,
    *,
    row_ids_R: Array | None = None,
) -> None:
    """Writes all that experts own of one copy or both, as `operands/quantized.py` describes them.

    `x`, of any floating dtype, has unit column stride. `row_ids` (`[R]` int32 or int64, read for owned rows only) makes
    `x` `[T, C]`: row r takes `x[row_ids[r]]`.
    """
    C, num_tiles = x_RC.shape[1], schedule.max_tiles(TILE_ROWS)
    if not num_tiles * C:
        return
    arguments: dict[str, Any] = {
        "x_ptr": x_RC,
        "row_ids_ptr": row_ids_R,
        "row_copy_ptr": row_copy and row_copy.elements,
        "row_scales_ptr": row_copy and row_copy.scales,
        "token_copy_ptr": token_copy and token_copy.elements,
        "token_scales_ptr": token_copy and token_copy.scales,
        "tiles_ptr": schedule.tiles(builder, TILE_ROWS),
        "C": C,
        "stride_x_r": x_RC.strides[0],
    }
    costs = partial(
        cost.quantize,
        C=C,
        itemsize=x_RC.dtype.itemsize,
        row_copy=row_copy is not None,
        token_copy=token_copy is not None,
        tokens=None if row_ids_R is None else x_RC.shape[0],
    )
    num_chunks = num_tiles * cdiv(C, CHUNK)
    if token_copy is not None and stages(builder.target, recipe, (x_RC,)):
        from .gluon_kernel import _quantize_kernel as staged_kernel

        builder.launch(staged_kernel, (num_chunks,), arguments, cost=costs, num_warps=8)
        return
    columns, num_warps = _SIZES[recipe]
    arguments |= {"RECIPE": recipe, "BLOCK_C": columns}
    grid = (num_chunks * (CHUNK // columns),)
    builder.launch(_quantize_kernel, grid, arguments, cost=costs, num_warps=num_warps)
