"""The one tolerance rule: twice the error of a plain PyTorch run in the same precision, plus a rounding band."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Results = Mapping[str, Tensor]

# A gradient passes four stages of a layer (GEMM, activation, its derivative, GEMM), and each rounds by up to eps / 2.
ROUNDING_BAND = 4 / 2  # in units of eps


def scales(expected: Results, magnitudes: Results | None = None) -> dict[str, Tensor]:
    """What errors are relative to: the largest value of a result or, where `magnitudes` has it, the largest sum of the
    magnitudes of its terms. Rounding is in proportion to the terms, which may cancel, not to their sum."""
    largest = {name: reference.abs().max() for name, reference in expected.items() if reference.numel()}
    return {name: max(scale, (magnitudes or {}).get(name, scale)) for name, scale in largest.items()}


def bound(
    expected: Results, low_precision: Results, dtype: torch.dtype, magnitudes: Results | None = None, layers: int = 1
) -> float:
    """What an error may be, relative to the scale of its result: `2 * (low-precision error + rounding band)`, the band
    of so many layers one after another.

    The low-precision error is the worst of all results: that of one small tensor alone can be zero by luck.
    """
    scale_of = scales(expected, magnitudes)
    errors = [(low_precision[name] - expected[name]).abs().max() / s for name, s in scale_of.items() if s > 0]
    return float(2 * (max(errors, default=0.0) + layers * ROUNDING_BAND * eps(dtype)))


def eps(dtype: torch.dtype) -> float:
    """Of the products in a dtype: TF32, where torch's setting allows it, has as many bits as fp16."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = torch.float16
    return torch.finfo(dtype).eps


def assert_close(
    actual: Results,
    expected: Results,
    low_precision: Results,
    dtype: torch.dtype,
    magnitudes: Results | None = None,
    layers: int = 1,
) -> None:
    """`actual` is within the bound of the float64 `expected`, key by key."""
    assert actual.keys() == expected.keys()
    relative = bound(expected, low_precision, dtype, magnitudes, layers)
    scale_of = scales(expected, magnitudes)
    for name, reference in expected.items():
        assert actual[name].shape == reference.shape, name
        assert torch.isfinite(actual[name]).all(), f"{name}: not finite"
        if reference.numel():
            error, allowed = (actual[name] - reference).abs().max(), relative * scale_of[name]
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
