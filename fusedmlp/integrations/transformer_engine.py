"""Rows that arrive in 8 bits, as a dispatcher delivers them in TransformerEngine's `Float8BlockwiseQTensor`.

Nothing here imports TransformerEngine: rows are known by their fields, those of its version of August 2026.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # elements of a row that share a scale


def plain_rows(x: Tensor) -> Tensor:
    """Return rows of a `Float8BlockwiseQTensor` as a tensor of their nominal dtype, any other tensor as it is.

    The values are exact in bfloat16, as scales are powers of two (`Float8BlockScaling`'s default): a layer with
    `recipe="fp8_block"` multiplies the very values that were sent. The gradient of x has the nominal dtype.

    Args:
        x: `[R, H]`, with the fields `_rowwise_data` `[R, H]` uint8, `_rowwise_scale_inv` `[H / 128, R padded to a
            multiple of 4]` float32, `_fp8_dtype` and `_is_2D_scaled`.

    Raises:
        TypeError: elements that are not e4m3, blocks of 128 x 128, no copy along rows, or an `MXFP8Tensor`.
        ValueError: a width that is no multiple of 128, or scales of another shape.
    """
    own: Any = x
    if not hasattr(own, "_rowwise_scale_inv"):
        return x
    data, scales = own._rowwise_data, own._rowwise_scale_inv
    of_blocks = getattr(own, "_is_2D_scaled", None)  # None: another kind of 8-bit tensor
    if data is None or of_blocks is not False or "E4M3" not in str(own._fp8_dtype):
        raise TypeError(
            "x: expected a plain tensor, or a Float8BlockwiseQTensor with rows of e4m3 in blocks of 1 x 128; got a "
            f"{type(x).__name__} of {'columns alone' if data is None else own._fp8_dtype}, _is_2D_scaled={of_blocks}"
        )
    num_rows, width = data.shape
    if width % BLOCK or scales.shape[0] != width // BLOCK or scales.shape[1] < num_rows:
        raise ValueError(
            f"Float8BlockwiseQTensor: expected a width that is a multiple of {BLOCK}, and scales [width / {BLOCK}, at "
            f"least {num_rows}]; got {tuple(data.shape)}, and scales {tuple(scales.shape)}"
        )
    rows: Tensor = _Dequantize.apply(x)  # type: ignore[no-untyped-call]
    return rows


class _Dequantize(torch.autograd.Function):
    """`x` in its nominal dtype; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        """Multiply elements by the scales of their blocks, in float32."""
        data, scales = x._rowwise_data.view(torch.float8_e4m3fn), x._rowwise_scale_inv
        rows: Tensor = data.to(x.dtype)
        rows.unflatten(1, (-1, BLOCK)).mul_(scales.T[: len(rows), :, None])
        return rows

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Return `dy`."""
        return dy
