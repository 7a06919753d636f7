"""The one tolerance rule: twice the error of a plain PyTorch run in the same precision, plus a rounding band."""

import torch


def assert_close(actual, expected, low_precision, dtype):
    """`actual` is at most `2 * (error of low_precision + rounding band)` from the float64 `expected`, key by key."""
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        got = actual[name]
        assert got.shape == reference.shape, name
        if reference.numel() == 0:
            continue
        assert torch.isfinite(got).all(), f"{name}: not finite"
        band = torch.finfo(dtype).eps * reference.abs().max()
        bound = 2 * ((low_precision[name] - reference).abs().max() + band)
        error = (got - reference).abs().max()
        assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}"
