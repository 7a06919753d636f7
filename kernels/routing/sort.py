"""A sort of the elements of one program, for which `tl.sort` would take seconds to compile and to interpret."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _swapped(x, at, other):
    """Swap `x[at]` and `x[other]` where they are in the wrong order. `other` is its own inverse."""
    partner = tl.gather(x, other, 0)
    return tl.where((x > partner) == (at < other), partner, x)


@triton.jit
def sort(x):
    """Sort `x` `[N]`, different integers, by a bitonic network; N is a power of 2."""
    N: tl.constexpr = x.shape[0]
    at = tl.arange(0, N)
    size = 2
    while size <= N:
        # Runs of size / 2 elements become runs of `size`: first against last, then by half the distance at a time.
        x = _swapped(x, at, at ^ (size - 1))
        distance = size // 4
        while distance > 0:
            x = _swapped(x, at, at ^ distance)
            distance = distance // 2
        size = size * 2
    return x
