"""The one tolerance rule: twice the error of a plain PyTorch run in the same precision, plus a rounding band."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

# A gradient passes four stages of a layer (GEMM, activation, its derivative, GEMM), and each rounds by up to eps / 2.
ROUNDING_BAND = 4 / 2  # in units of eps

Results = Mapping[str, Tensor]


def eps(dtype: torch.dtype) -> float:
    """Machine epsilon of products in a dtype. TF32, where torch's setting allows it, has as many bits as fp16."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = torch.float16
    return torch.finfo(dtype).eps


class Errors:
    """Errors of results, and what the rule allows; results come whole or part by part, expert by expert for example.

    An error is relative to the largest value of a result or, where `magnitudes` has it, to the largest sum of the
    magnitudes of its terms: rounding is in proportion to the terms, which may cancel, not to their sum. The band is
    that of `layers` layers, one after another.
    """

    def __init__(self, dtype: torch.dtype, magnitudes: Results | None = None, layers: int = 1) -> None:
        self.band = layers * ROUNDING_BAND * eps(dtype)
        self.magnitudes = magnitudes or {}
        self.found: dict[str, tuple[float, float, float]] = {}  # result -> (error, plain PyTorch's error, scale)

    def add(
        self, name: str, actual: Tensor, expected: Tensor, low_precision: Tensor, accumulated: Tensor | None = None
    ) -> None:
        """Compare a result, or a part of it, with the float64 `expected`; NaN counts as infinite.

        `accumulated`: what its sums may lose in a tensor core, and plain PyTorch's do not, for each element. The band
        is wider by half of it: truncation takes that on average, and the rule allows twice the band.
        """
        if actual.shape != expected.shape:
            raise AssertionError(f"{name}: expected shape {tuple(expected.shape)}; got {tuple(actual.shape)}")
        if not expected.numel():
            return
        off = (actual.double() - expected).abs()
        error = float((off if accumulated is None else (off - accumulated).clamp(min=0)).max())
        lost = float((low_precision.double() - expected).abs().max())
        if not math.isfinite(lost):
            raise AssertionError(f"{name}: a reference is not finite, so that any result would be right")
        new = (math.inf if math.isnan(error) else error, lost, float(expected.abs().max()))
        old = self.found.get(name, new)
        self.found[name] = max(old[0], new[0]), max(old[1], new[1]), max(old[2], new[2])

    def _scale(self, name: str) -> float:
        scale = self.found[name][2]
        return max(scale, float(self.magnitudes.get(name, scale)))

    def relative(self) -> dict[str, float]:
        """The largest error of each result; where all of a result should be zero, any error is infinite."""
        scales = {name: self._scale(name) for name in self.found}
        return {
            name: error / scales[name] if scales[name] > 0 else math.inf * error if error else 0.0
            for name, (error, _, _) in self.found.items()
        }

    def allowed(self) -> float:
        """The largest relative error that is right: `2 * (low-precision error + rounding band)`.

        The low-precision error is the worst of all results: that of one small tensor alone can be zero by luck.
        """
        lost = [low / self._scale(name) for name, (_, low, _) in self.found.items() if self._scale(name) > 0]
        return 2 * (max(lost, default=0.0) + self.band)

    def verify(self, what: str = "") -> None:
        """Raise, with the names of results that are off by more; `what` begins the message."""
        allowed = self.allowed()
        wrong = [f"{name}: error {error:.3g}" for name, error in self.relative().items() if not error <= allowed]
        if wrong:
            raise AssertionError(f"{what}{': ' * bool(what)}{', '.join(wrong)}, allowed {allowed:.3g}")


def errors_of(
    actual: Results,
    expected: Results,
    low_precision: Results,
    dtype: torch.dtype,
    magnitudes: Results | None = None,
    layers: int = 1,
    accumulated: Results | None = None,
) -> Errors:
    """Errors of whole results, by the names that both have."""
    assert expected, "expected results to compare; got none"
    assert actual.keys() == expected.keys(), f"expected {list(expected)}; got {list(actual)}"
    errors = Errors(dtype, magnitudes, layers)
    for name, reference in expected.items():
        errors.add(name, actual[name], reference, low_precision[name], (accumulated or {}).get(name))
    return errors


def assert_close(
    actual: Results,
    expected: Results,
    low_precision: Results,
    dtype: torch.dtype,
    magnitudes: Results | None = None,
    layers: int = 1,
    accumulated: Results | None = None,
) -> None:
    """`actual` is right by the rule; `expected` is float64, `low_precision` of plain PyTorch in the same precision."""
    errors_of(actual, expected, low_precision, dtype, magnitudes, layers, accumulated).verify()


def assert_norms_close(actual: Results, expected: Results, low_precision: Results, dtype: torch.dtype) -> None:
    """The rule for the 2-norm of each result: it finds an error of all elements that is small beside the largest.

    It is for results of many elements, whose roundings average out: the band is half an eps.
    """
    for name, reference in expected.items():
        error, lost = (float((t[name].double() - reference).norm()) for t in (actual, low_precision))
        allowed = 2 * (lost + eps(dtype) / 2 * float(reference.norm()))
        assert math.isfinite(allowed), f"{name}: a reference is not finite, so that any result would be right"
        assert error <= allowed, f"{name}: 2-norm of the error {error:.3g}, allowed {allowed:.3g}"
