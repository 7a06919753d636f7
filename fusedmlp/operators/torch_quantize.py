"""Quantization to 8 bits in PyTorch, whose scales and elements are those of TransformerEngine, bit for bit.

Elements are e4m3, with one scale for each block: an element times its scale is the value. Scales are powers of two, so
products with them are exact. Recipes:

- `fp8_block` (`Float8BlockScaling` with its defaults): `1 / scale` is `448 / amax`, rounded down to a power of two;
  amax is the largest magnitude of the block. The scale is 1 if amax is zero or infinite. Scales are float32.
- `mxfp8` (`MXFP8BlockScaling`): the scale is `amax * (1 / 448)` in float32, rounded up to a power of two. Scales are
  E8M0, the exponent plus 127 in a byte; 254 if amax is infinite.

amax ignores NaN. Elements beyond 448 become 448, infinities too; NaN stays NaN. Sources: TransformerEngine's
common/recipe/recipe_common.cuh (`compute_scale_from_amax`), common/util/ptx_arch_spec.cuh (`float_to_e8m0`) and
common/util/ptx.cuh (`exp2f_rcp`), of August 2026; OCP Microscaling Formats 1.0 for E8M0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmlp.kernels.operands import quantized
from fusedmlp.operators.types import RowCopies, WeightCopies
from fusedmlp.recipe import BLOCKS

if TYPE_CHECKING:
    from fusedmlp.kernels.tiles.table import Recipe

_WEIGHT_BLOCKS = {"fp8_block": (128, 128), "mxfp8": (1, 32)}  # of a copy, with what is contracted last
MAX = 448.0  # the largest finite e4m3
_EXPONENT = 0x7F800000  # of float32
_NAN = 0x7F  # of e4m3


class Quantized(NamedTuple):
    """A matrix, or several, in 8 bits."""

    elements: Tensor  # [..., M, N], float8_e4m3fn
    scales: Tensor  # [..., ceil(M / m), ceil(N / n)], float32 or float8_e8m0fnu, for blocks of [m, n]

    def dequantize(self, block: tuple[int, int], dtype: torch.dtype = torch.float64) -> Tensor:
        """The values, `[..., M, N]`: exact in float64, and in bfloat16 from 2^-133 on."""
        m, n = block
        M, N = self.elements.shape[-2:]
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.scales.float().to(wide).repeat_interleave(m, -2).repeat_interleave(n, -1)
        return (self.elements.to(wide) * scales[..., :M, :N]).to(dtype)


def quantize(x: Tensor, recipe: str, block: tuple[int, int]) -> Quantized:
    """Quantize `x` `[..., M, N]`, float32, bfloat16 or float16, in blocks of `[m, n]`; the last ones may be shorter.

    TransformerEngine's blocks are `[1, 128]`, `[128, 1]` and, for weights, `[128, 128]` with `fp8_block`; `[1, 32]` and
    `[32, 1]` with `mxfp8`.
    """
    m, n = block
    M, N = x.shape[-2:]
    padded = F.pad(x.float(), (0, -N % n, 0, -M % m))
    blocks = padded.unflatten(-1, (-1, n)).unflatten(-3, (-1, m))  # [..., M / m, m, N / n, n]
    amax = blocks.abs().nan_to_num(0.0, torch.inf).amax((-3, -1))
    inverse, scales = _of_fp8_block(amax) if recipe == "fp8_block" else _of_mxfp8(amax)
    scaled = blocks * inverse[..., :, None, :, None]
    elements = scaled.flatten(-2).flatten(-3, -2)[..., :M, :N]
    return Quantized(_to_e4m3(elements), scales)


def rounded(x: Tensor, recipe: str, block: tuple[int, int]) -> Tensor:
    """Quantize `x` `[..., M, N]` and dequantize it: the values that a GEMM of 8 bits multiplies, in the dtype of x."""
    return quantize(x, recipe, block).dequantize(block, x.dtype) if x.numel() else x


def rounded_weights(w: Sequence[Tensor], recipe: str, transposed: bool) -> list[Tensor]:
    """`rounded` weights, `[..., N, K]` each, that are contracted along `K` if `transposed`, else along `N`."""
    size = BLOCKS[recipe]
    along = (1, size) if transposed else (size, 1)
    return [rounded(each, recipe, (size, size) if recipe == "fp8_block" else along) for each in w]


def empty_weight_copies(w: Sequence[Tensor], recipe: Recipe) -> WeightCopies:
    """Uninitialised copies of weights, one packed tensor `[E, N, K]` or E of `[N, K]`."""
    N, K = w[0].shape[-2:]
    num_experts = w[0].shape[0] if w[0].dim() == 3 else len(w)
    made = []
    for shape in ((num_experts, N, K), (num_experts, K, N)):
        scales = quantized.weight_scales_shape(*shape, recipe)
        made.append(w[0].new_empty(shape, dtype=torch.float8_e4m3fn))
        made.append(w[0].new_empty(scales, dtype=quantized.SCALE_DTYPES[recipe]))
    return WeightCopies(*made)


def quantize_weights(w: Sequence[Tensor], recipe: Recipe) -> WeightCopies:
    """Copies of weights, rounded to bfloat16 first."""
    made, experts = empty_weight_copies(w, recipe), w[0].unbind() if w[0].dim() == 3 else w
    by_in, by_out = (made.by_in, made.by_in_scales), (made.by_out, made.by_out_scales)
    for i, w_NK in enumerate(experts):
        for (elements, scales), lines in ((by_in, w_NK), (by_out, w_NK.mT)):
            copied = quantize(lines.bfloat16(), recipe, _WEIGHT_BLOCKS[recipe])
            elements[i].copy_(copied.elements)
            scales[i].copy_(_tiled(copied.scales) if recipe == "mxfp8" else copied.scales)
    return made


def dequantized_weights(copy: Sequence[Tensor], recipe: str) -> Tensor:
    """Values of a copy, `[E, M, C]` bfloat16."""
    elements, scales = copy
    if recipe == "mxfp8":
        scales = _untiled(scales)[..., : elements.shape[-2], :].view(torch.float8_e8m0fnu)
    return Quantized(elements, scales).dequantize(_WEIGHT_BLOCKS[recipe], torch.bfloat16)


def empty_row_copies(x_RC: Tensor, num_experts: int, recipe: Recipe) -> RowCopies:
    """Uninitialised copies of rows. Scales: `[R, blocks]` of `rows`; of `tokens` `[blocks, C]`, expert by expert."""
    (R, C), size, scales = x_RC.shape, BLOCKS[recipe], quantized.SCALE_DTYPES[recipe]
    rows, tokens = (x_RC.new_empty(R, C, dtype=torch.float8_e4m3fn) for _ in range(2))
    shapes = (R, -(-C // size)), (R // size + num_experts, C)
    rows_scales, tokens_scales = (x_RC.new_empty(shape, dtype=scales) for shape in shapes)
    return RowCopies(rows, rows_scales, tokens, tokens_scales)


def quantize_rows(x_RC: Tensor, sizes: Sequence[int], recipe: Recipe) -> RowCopies:
    """Both copies of rows, of which the first expert has `sizes[0]`."""
    made, size = empty_row_copies(x_RC, len(sizes), recipe), BLOCKS[recipe]
    tokens = _by_expert(made.tokens, made.tokens_scales, sizes, recipe)
    parts = zip(x_RC[: sum(sizes)].split(sizes), *tokens, strict=True)
    for block, x, elements, scales in (((1, size), x_RC, *made[:2]), *(((size, 1), *part) for part in parts)):
        if x.numel():
            copied = quantize(x, recipe, block)
            elements.copy_(copied.elements)
            scales.copy_(copied.scales if recipe == "fp8_block" else copied.scales.view(torch.uint8))
    return made


def dequantized_rows(rows: Tensor, scales: Tensor, recipe: str) -> Tensor:
    """Values of the copy along columns, `[R, C]` bfloat16."""
    return Quantized(rows, _scales(scales, recipe)).dequantize((1, BLOCKS[recipe]), torch.bfloat16)


def dequantized_tokens(tokens: Tensor, scales: Tensor, sizes: Sequence[int], recipe: str) -> Tensor:
    """Values of the copy along rows, `[R, C]` bfloat16; those of padding rows are not written."""
    values = torch.empty_like(tokens, dtype=torch.bfloat16)
    parts = zip(values[: sum(sizes)].split(sizes), *_by_expert(tokens, scales, sizes, recipe), strict=True)
    for out, elements, stored in parts:
        if out.numel():
            out.copy_(Quantized(elements, _scales(stored, recipe)).dequantize((BLOCKS[recipe], 1), torch.bfloat16))
    return values


def _scales(stored: Tensor, recipe: str) -> Tensor:
    return stored if recipe == "fp8_block" else stored.view(torch.float8_e8m0fnu)


def _by_expert(tokens: Tensor, scales: Tensor, sizes: Sequence[int], recipe: str) -> tuple[Sequence[Tensor], ...]:
    """Elements and scales of every expert in a copy along rows."""
    blocks = [-(-size // BLOCKS[recipe]) for size in sizes]
    return tokens[: sum(sizes)].split(sizes), scales[: sum(blocks)].split(blocks)


def _tiled(scales_MB: Tensor) -> Tensor:
    """Scales by line and block in the order of kernels/operands/quantized.py: `[C / 128, M / 128, 32, 4, 4]`."""
    M, B = scales_MB.shape
    padded = F.pad(scales_MB.view(torch.uint8), (0, -B % 4, 0, -M % 128))
    return padded.view(-(-M // 128), 4, 32, -1, 4).permute(3, 0, 2, 1, 4)


def _untiled(scales: Tensor) -> Tensor:
    """The inverse of `_tiled`, for all experts and with its padding: `[E, lines, blocks]`."""
    E, steps, lines = scales.shape[:3]
    return scales.permute(0, 2, 4, 3, 1, 5).reshape(E, lines * 128, steps * 4)


def _of_fp8_block(amax: Tensor) -> tuple[Tensor, Tensor]:
    """`(1 / scale, scale)` of blocks, both float32."""
    ratio = amax.new_tensor(MAX) / amax  # `MAX / amax` would multiply by a reciprocal, which is rounded
    inverse = (ratio.view(torch.int32) & _EXPONENT).view(torch.float32)
    inverse[ratio.isinf()] = 2.0**127  # amax is too small for 448 / amax to be finite
    inverse[(amax == 0) | amax.isinf()] = 1.0
    return inverse, 1 / inverse


def _of_mxfp8(amax: Tensor) -> tuple[Tensor, Tensor]:
    """`(1 / scale, scale)` of blocks: float32 and E8M0."""
    scale = amax * (1 / MAX)
    mantissa = scale.view(torch.int32) & ~_EXPONENT
    exponent = scale.view(torch.int32) >> 23
    # A subnormal rounds up to 2^-126 (1), or to 2^-127 (0), which is one itself.
    byte = exponent + torch.where(exponent == 0, mantissa > 1 << 22, mantissa > 0)
    byte.clamp_(max=254)
    inverse = ((254 - byte) << 23).view(torch.float32)
    inverse[byte == 254] = 2.0**-127
    return inverse, byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def _to_e4m3(x: Tensor) -> Tensor:
    """Round to nearest, ties to even, and saturate; one NaN for all."""
    elements = x.clamp(-MAX, MAX).to(torch.float8_e4m3fn)  # PyTorch saturates, too, but older versions make NaN of it
    elements.view(torch.uint8)[x.isnan()] = _NAN
    return elements
