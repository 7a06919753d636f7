"""What each pass costs at least: FLOPs, and bytes with every operand read and every result written once.

`rows` is the number of rows of each expert, over all segments. Weights of experts without rows are not read, and
their gradients, if added to, not touched. `itemsize` is of activations and weights, in bytes. FLOPs are the GEMM's.
"""

from __future__ import annotations

from collections.abc import Sequence

from .launches import Launch

_FP32 = 4  # bytes: probabilities and their gradients


def fc1_act(
    rows: Sequence[int], H: int, F: int, itemsize: int, *, gated: bool = True, bias: bool = False, probs: bool = True
) -> Launch:
    """Pass (1): reads x `[R, H]` and fc1 `[E, G, H]`, writes h `[R, G]` and the activation `[R, F]`."""
    R, E, G = sum(rows), _used(rows), _channels(F, gated)
    elements = R * (H + G + F) + E * G * (H + bias)
    return Launch("fc1_act", 2 * R * G * H, itemsize * elements + _FP32 * R * probs)


def gemm(rows: Sequence[int], N: int, K: int, itemsize: int, *, bias: bool = False, scale: bool = False) -> Launch:
    """Passes (2) and (4): reads x `[R, K]` and w `[E, N, K]`, writes y `[R, N]`."""
    R, E = sum(rows), _used(rows)
    elements = R * (N + K) + E * N * (K + bias)
    return Launch("gemm", 2 * R * N * K, itemsize * elements + _FP32 * R * scale)


def dgrad_act(
    rows: Sequence[int], H: int, F: int, itemsize: int, *, gated: bool = True, bias: bool = False, probs: bool = True
) -> Launch:
    """Pass (3): reads dy `[R, H]`, fc2 `[E, H, F]` and h `[R, G]`, writes dh `[R, G]`, the activation and dprobs."""
    R, E, G = sum(rows), _used(rows), _channels(F, gated)
    elements = R * (H + 2 * G + F) + E * H * (F + bias)
    return Launch("dgrad_act", 2 * R * H * F, itemsize * elements + 2 * _FP32 * R * probs)


def wgrad(
    rows: Sequence[int], N: int, K: int, itemsize: int, grad_itemsize: int, *, accumulate: bool, bias: bool = False
) -> Launch:
    """Passes (5) and (6): reads dy `[R, N]` and x `[R, K]`; reads and writes `[E, N, K]`, or writes it alone."""
    R, E = sum(rows), len(rows)
    moved = 2 * _used(rows) if accumulate else E  # times the size of one expert's gradient
    grad_bytes = grad_itemsize * moved * N * K
    return Launch("wgrad", 2 * R * N * K, itemsize * (R * (N + K) + E * N * bias) + grad_bytes, grad_bytes)


def _used(rows: Sequence[int]) -> int:
    return sum(n > 0 for n in rows)


def _channels(F: int, gated: bool) -> int:
    return 2 * F if gated else F
