"""Least cost of each pass: FLOPs, and bytes with every operand read and every result written once.

`rows` is the number of rows of each expert, over all segments. Weights of experts without rows are not read, and
their gradients, if added to, not touched. `itemsize`: bytes of an element of activations, weights and biases. `grad`,
`bias_grad`, `scale`, `probs`: bytes of an element of that tensor, 0 without it.

Rows that are gathered from tokens share them: `tokens` is how many there are (None: nothing is gathered), and each is
read once, with an int32 index for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..operands.quantized import CHUNK, TILE_ROWS
from ..tiles.rounding import cdiv

_FP32 = _INT32 = 4


@dataclass(frozen=True)
class Cost:
    """The work that the equation of a launch needs, whatever the kernel does.

    `bytes` counts every operand once; `grad_bytes` is the part of it that reads and writes weight gradients.
    """

    kernel: str
    flops: int
    bytes: int
    grad_bytes: int = 0


def product_flops(M: int, N: int, K: int) -> int:
    """FLOPs of `[M, K] @ [K, N]`: a multiplication and an addition for each term."""
    return 2 * M * N * K


def fc1_act(
    rows: Sequence[int],
    H: int,
    F: int,
    itemsize: int,
    *,
    gated: bool = True,
    bias: bool = False,
    probs: int = _FP32,
    tokens: int | None = None,
) -> Cost:
    """Pass (1): reads x `[R, H]` and fc1 `[E, G, H]`, writes h `[R, G]` and the activation `[R, F]`."""
    R, E, G = sum(rows), _used(rows), _channels(F, gated)
    elements = R * (G + F) + E * G * (H + bias)
    return Cost("fc1_act", product_flops(R, G, H), itemsize * elements + _read(R, H, itemsize, tokens) + probs * R)


def gemm(rows: Sequence[int], N: int, K: int, itemsize: int, *, bias: bool = False, scale: int = 0) -> Cost:
    """Passes (2) and (4): reads x `[R, K]` and w `[E, N, K]`, writes y `[R, N]`."""
    R, E = sum(rows), _used(rows)
    elements = R * (N + K) + E * N * (K + bias)
    return Cost("gemm", product_flops(R, N, K), itemsize * elements + scale * R)


def dgrad_act(
    rows: Sequence[int],
    H: int,
    F: int,
    itemsize: int,
    *,
    gated: bool = True,
    bias: bool = False,
    probs: int = _FP32,
    tokens: int | None = None,
) -> Cost:
    """Pass (3): reads dy `[R, H]`, fc2 `[E, H, F]` and h `[R, G]`, writes dh `[R, G]`, the activation and dprobs."""
    R, E, G = sum(rows), _used(rows), _channels(F, gated)
    elements = R * (2 * G + F) + E * H * (F + bias)
    num_bytes = itemsize * elements + _read(R, H, itemsize, tokens) + (probs + _FP32 if probs else 0) * R
    return Cost("dgrad_act", product_flops(R, F, H), num_bytes)


def wgrad(
    rows: Sequence[int],
    N: int,
    K: int,
    itemsize: int,
    grad: int,
    *,
    accumulate: bool,
    bias_grad: int = 0,
    scale: int = 0,
    dy_tokens: int | None = None,
    x_tokens: int | None = None,
) -> Cost:
    """Passes (5) and (6): reads dy `[R, N]` and x `[R, K]`; reads and writes `[E, N, K]`, or writes it alone.

    Column sums of dy for the bias, scaled or not, count as FLOPs too: they may be all there is.
    """
    R, E = sum(rows), len(rows)
    moved = 2 * _used(rows) if accumulate else E  # times the size of one expert's gradient
    grad_bytes = grad * moved * N * K
    num_bytes = grad_bytes + bias_grad * E * N + scale * R + _read(R, N, itemsize, dy_tokens)
    if grad:
        num_bytes += _read(R, K, itemsize, x_tokens)
    flops = (product_flops(N, K, R) if grad else 0) + (R * N * (2 if scale else 1) if bias_grad else 0)
    return Cost("wgrad", flops, num_bytes, grad_bytes)


def quantize(
    rows: Sequence[int],
    C: int,
    itemsize: int,
    *,
    row_copy: bool = True,
    token_copy: bool = True,
    tokens: int | None = None,
) -> Cost:
    """Reads x `[R, C]`, writes a byte for each element of a copy, and 512 bytes of scales for each tile and chunk.

    A token copy has 128 rows for every tile. Each element of a copy is multiplied once.
    """
    R, tiles = sum(rows), sum(cdiv(n, TILE_ROWS) for n in rows)
    scales = 512 * tiles * cdiv(C, CHUNK)
    written = row_copy * (R * C + scales) + token_copy * (TILE_ROWS * tiles * C + scales)
    return Cost("quantize", R * C * (row_copy + token_copy), _read(R, C, itemsize, tokens) + written)


def route(R: int, E: int, itemsize: int, probs: int) -> Cost:
    """Reads ids `[R]`, writes offsets `[E + 1]`, and tokens and rows `[R]`; copies probs `[R]`; `itemsize` of ids."""
    return Cost("route", 0, itemsize * R + _INT32 * (E + 1 + 2 * R) + 2 * probs * R)


def combine(T: int, K: int, H: int, itemsize: int) -> Cost:
    """Reads y `[T * K, H]` and rows `[T * K]`, writes `[T, H]`."""
    return Cost("combine", T * K * H, itemsize * (T * K + T) * H + _INT32 * T * K)


def _read(R: int, columns: int, itemsize: int, tokens: int | None) -> int:
    """Bytes of `[R, columns]`, or of its tokens and the index."""
    return itemsize * R * columns if tokens is None else itemsize * min(tokens, R) * columns + _INT32 * R


def _used(rows: Sequence[int]) -> int:
    return sum(n > 0 for n in rows)


def _channels(F: int, gated: bool) -> int:
    return 2 * F if gated else F
