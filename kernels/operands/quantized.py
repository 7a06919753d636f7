"""Matrices in 8 bits, as kernels take them: rows of experts, quantized along columns or along rows.

Both copies of a matrix `[R, C]` go by the tiles of a plan for 128 rows, which never cross experts, and by chunks of 128
columns, so alignment does not depend on where an expert begins:

- A row copy, `[R, C]` e4m3, has the matrix' own rows, in blocks along columns.
- A token copy has 128 rows for each tile, zeros after the last one of an expert, in blocks along rows: `[tiles, 128,
  C]` e4m3 for mxfp8; transposed for fp8_block, `[tiles, C, 128]`, as `wgmma` takes 8 bits with contiguous K only.
- The scales of 128 rows and 128 columns are 512 bytes together: `[tiles, chunks, 128]` fp32, by row or, in a token
  copy, by column; for mxfp8 `[tiles, chunks, 32, 4, 4]` bytes, E8M0 in the order in which `tcgen05.cp` copies them: row
  or column l and block b of 32 at `[l % 32, l // 32, b]`.

Blocks have 128 elements (fp8_block) or 32 (mxfp8). C is a multiple of 32. Rows of a row copy that no expert owns, and
tiles past the last one of a load, are not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..tiles.rounding import cdiv

if TYPE_CHECKING:  # costs are known without triton
    from ..tiles.table import Recipe

TILE_ROWS = CHUNK = 128
SCALE_DTYPES: dict[Recipe, torch.dtype] = {"fp8_block": torch.float32, "mxfp8": torch.uint8}


class Quantized(NamedTuple):
    """A row copy or a token copy: tensors or, in a plan, arrays; contiguous."""

    elements: Any  # float8_e4m3fn
    scales: Any  # of `SCALE_DTYPES`


def token_copy_shape(num_tiles: int, C: int, recipe: Recipe) -> tuple[int, ...]:
    """Shape of the elements of a token copy."""
    return (num_tiles, TILE_ROWS, C) if recipe == "mxfp8" else (num_tiles, C, TILE_ROWS)


def scales_shape(num_tiles: int, C: int, recipe: Recipe) -> tuple[int, ...]:
    """Shape of the scales of either copy."""
    return (num_tiles, cdiv(C, CHUNK), *((32, 4, 4) if recipe == "mxfp8" else (CHUNK,)))
