"""The one tolerance rule: twice the error of a plain PyTorch run in the same precision, plus a rounding band."""

import torch

# A gradient passes four stages (GEMM, activation, its derivative, GEMM), and each rounds by up to eps / 2.
ROUNDING_BAND = 4 / 2  # in units of eps


def bound(expected, low_precision, dtype):
    """What an error may be, relative to the largest value of its result: `2 * (low-precision error + rounding band)`.

    The low-precision error is the worst of all results: that of one small tensor alone can be zero by luck.
    """
    scales = {name: reference.abs().max() for name, reference in expected.items() if reference.numel()}
    errors = [(low_precision[name] - expected[name]).abs().max() / scale for name, scale in scales.items() if scale > 0]
    return float(2 * (max(errors, default=0.0) + ROUNDING_BAND * torch.finfo(dtype).eps))


def assert_close(actual, expected, low_precision, dtype):
    """`actual` is within the bound of the float64 `expected`, key by key."""
    assert actual.keys() == expected.keys()
    relative = bound(expected, low_precision, dtype)
    for name, reference in expected.items():
        assert actual[name].shape == reference.shape, name
        assert torch.isfinite(actual[name]).all(), f"{name}: not finite"
        if reference.numel():
            error, scale = (actual[name] - reference).abs().max(), reference.abs().max()
            assert error <= relative * scale, f"{name}: error {error:.3g}, allowed {relative * scale:.3g}"
