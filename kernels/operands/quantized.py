"""Matrices in 8 bits, as kernels take them: rows of experts, quantized along columns or along rows, and weights.

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

Weights `[E, N, K]` (N out features, K in features) have a copy for each way in which GEMMs contract them. In both, the
features that are contracted are contiguous, so one kernel multiplies either, and each copy is the other one of the
transposed weights: `by_in` `[E, N, K]`, for products over in features (forward), and `by_out` `[E, K, N]`, for products
over out features (dgrad, dx). `wgmma`, and `mma.sync` of sm_120, take 8 bits in no other way; `tcgen05` would also take
`by_out` as the weights lie.

For a copy `[E, M, C]`, with C contracted:

- fp8_block: blocks of 128 x 128, scales `[E, ceil(M / 128), ceil(C / 128)]` fp32. Both copies have the same bits.
- mxfp8: blocks of 32 along C, scales `[E, ceil(C / 128), ceil(M / 128), 32, 4, 4]`: 512 bytes for 128 lines of M and
  128 of C, as above. A step along C of a tile of 256 lines takes two neighbouring chunks, with one TMA.

Scales past the ends are those of zeros. Weights of fp32 are rounded to bf16 before, as layers compute with them.
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
    """A row copy, a token copy or one of weights: tensors or, in a plan, arrays; contiguous."""

    elements: Any  # float8_e4m3fn
    scales: Any  # of `SCALE_DTYPES`

    @property
    def num_experts(self) -> int:
        """`E` of a copy of weights."""
        return int(self.elements.shape[0])


def is_quantized(value: Any) -> bool:
    """Whether a list of tensors is the elements and scales of one copy, rather than tensors of experts."""
    return type(value) is list and len(value) == 2 and value[0].dtype is torch.float8_e4m3fn


def token_copy_shape(num_tiles: int, C: int, recipe: Recipe) -> tuple[int, ...]:
    """Shape of the elements of a token copy."""
    return (num_tiles, TILE_ROWS, C) if recipe == "mxfp8" else (num_tiles, C, TILE_ROWS)


def scales_shape(num_tiles: int, C: int, recipe: Recipe) -> tuple[int, ...]:
    """Shape of the scales of either copy."""
    return (num_tiles, cdiv(C, CHUNK), *((32, 4, 4) if recipe == "mxfp8" else (CHUNK,)))


def weight_scales_shape(num_experts: int, M: int, C: int, recipe: Recipe) -> tuple[int, ...]:
    """Shape of the scales of a copy of weights `[E, M, C]`, with C contracted."""
    lines, steps = cdiv(M, CHUNK), cdiv(C, CHUNK)
    return (num_experts, steps, lines, 32, 4, 4) if recipe == "mxfp8" else (num_experts, lines, steps)
