"""Least cost of each pass: FLOPs, and bytes with every operand read and every result written once.

`rows` is the number of rows of each expert, over all segments. Weights of experts without rows are not read, and
their gradients, if added to, not touched. `itemsize`: bytes of an element of activations, weights and biases. `grad`,
`bias_grad`, `scale`, `probs`: bytes of an element of that tensor, 0 without it.

Rows that are gathered from tokens share them: `tokens` is how many there are (None: nothing is gathered), and each is
read once, with an int32 index for every row. `rank`: columns of an adapter's t `[R, rank]` and b `[E, N, rank]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..operands.quantized import CHUNK, TILE_ROWS
from ..tiles.rounding import cdiv

if TYPE_CHECKING:
    from ..tiles.table import Recipe

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
    rank: int = 0,
) -> Cost:
    """Pass (1): reads x `[R, H]` and fc1 `[E, G, H]`, writes h `[R, G]` and the activation `[R, F]`."""
    R, E, G = sum(rows), _used(rows), _channels(F, gated)
    elements = R * (G + F + rank) + E * G * (H + bias + rank)
    return Cost(
        "fc1_act", product_flops(R, G, H + rank), itemsize * elements + _read(R, H, itemsize, tokens) + probs * R
    )


def gemm(rows: Sequence[int], N: int, K: int, itemsize: int, *, bias: bool = False, scale: int = 0) -> Cost:
    """Passes (2) and (4): reads x `[R, K]` and w `[E, N, K]`, writes y `[R, N]`."""
    R, E = sum(rows), _used(rows)
    elements = R * (N + K) + E * N * (K + bias)
    return Cost("gemm", product_flops(R, N, K), itemsize * elements + scale * R)


def gemm_quantized(
    rows: Sequence[int], N: int, K: int, recipe: Recipe, y: int, *, bias: int = 0, scale: int = 0
) -> Cost:
    """`gemm` of x and w in 8 bits. For 128 elements along K, scales are 512 bytes for each row tile, and for 128 rows
    of w one of fp32, or 512 bytes.

    `y`, `bias`: bytes of an element.
    """
    R, E, tiles = sum(rows), _used(rows), sum(cdiv(n, TILE_ROWS) for n in rows)
    scales = (512 * tiles + (512 if recipe == "mxfp8" else _FP32) * E * cdiv(N, CHUNK)) * cdiv(K, CHUNK)
    num_bytes = R * K + E * N * K + scales + y * R * N + bias * E * N + scale * R
    return Cost("gemm", product_flops(R, N, K), num_bytes)


def fc1_act_quantized(
    rows: Sequence[int],
    H: int,
    F: int,
    recipe: Recipe,
    h: int,
    *,
    gated: bool = True,
    bias: int = 0,
    probs: int = _FP32,
) -> Cost:
    """`gemm_quantized` of x `[R, H]` and fc1 `[E, G, H]`, which also writes a row copy of the activation, `[R, F]`.

    Only FLOPs of the product are counted. `h`, `bias`: bytes of an element.
    """
    product = gemm_quantized(rows, _channels(F, gated), H, recipe, h, bias=bias, scale=probs)
    return Cost("fc1_act", product.flops, product.bytes + _copies(rows, F, True, False)[1])


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
    rank: int = 0,
) -> Cost:
    """Pass (3): reads dy `[R, H]`, fc2 `[E, H, F]` and h `[R, G]`, writes dh `[R, G]`, the activation and dprobs."""
    R, E, G = sum(rows), _used(rows), _channels(F, gated)
    elements = R * (2 * G + F + rank) + E * (H * (F + bias) + F * rank)
    num_bytes = itemsize * elements + _read(R, H, itemsize, tokens) + (probs + _FP32 if probs else 0) * R
    return Cost("dgrad_act", product_flops(R, F, H + rank), num_bytes)


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


def wgrad_quantized(rows: Sequence[int], N: int, K: int, grad: int, *, accumulate: bool) -> Cost:
    """`wgrad` of token copies in 8 bits: 128 rows for every tile, and 512 bytes of scales for 128 columns of one."""
    tiles = sum(cdiv(n, TILE_ROWS) for n in rows)
    moved = 2 * _used(rows) if accumulate else len(rows)
    grad_bytes = grad * moved * N * K
    read = tiles * (TILE_ROWS * (N + K) + 512 * (cdiv(N, CHUNK) + cdiv(K, CHUNK)))
    return Cost("wgrad", product_flops(N, K, sum(rows)), read + grad_bytes, grad_bytes)


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
    multiplied, written = _copies(rows, C, row_copy, token_copy)
    return Cost("quantize", multiplied, _read(sum(rows), C, itemsize, tokens) + written)


def act_quantize(rows: Sequence[int], F: int, itemsize: int, *, gated: bool = True, probs: int = _FP32) -> Cost:
    """Reads h `[R, G]`, writes a row copy of the activation, `[R, F]`. Only the products with scales are counted."""
    R, G = sum(rows), _channels(F, gated)
    multiplied, written = _copies(rows, F, True, False)
    return Cost("act_quantize", multiplied, (itemsize * G + probs) * R + written)


def dgrad_act_quantize(
    rows: Sequence[int],
    F: int,
    itemsize: int,
    *,
    gated: bool = True,
    probs: int = _FP32,
    dh_rows: bool = True,
    dh_tokens: bool = True,
    a_tokens: bool = True,
    dh: bool = False,
    a: bool = False,
) -> Cost:
    """Reads d `[R, F]` and h `[R, G]`, writes a row copy and a token copy of dh `[R, G]`, a token copy of the
    activation, those two in 16 bits, and dprobs. Only the products with scales are counted.
    """
    R, G = sum(rows), _channels(F, gated)
    of_dh, of_a = _copies(rows, G, dh_rows, dh_tokens), _copies(rows, F, False, a_tokens)
    of_row = itemsize * (F + G + dh * G + a * F) + (probs + _FP32 if probs else 0)
    num_bytes = of_row * R + of_dh[1] + of_a[1]
    return Cost("dgrad_act_quantize", of_dh[0] + of_a[0], num_bytes)


def quantize_weights(
    E: int, N: int, K: int, itemsize: int, recipe: Recipe, *, by_in: bool = True, by_out: bool = True
) -> Cost:
    """Reads w `[E, N, K]`, writes a byte for each element of a copy, and the scales of every 128 x 128 elements: one of
    fp32, or 512 bytes.

    Each element of a copy is multiplied once. For fp8_block both copies have the same elements.
    """
    size, copies = E * N * K, by_in + by_out
    scales = E * cdiv(N, CHUNK) * cdiv(K, CHUNK) * (512 if recipe == "mxfp8" else _FP32)
    flops = size * (copies if recipe == "mxfp8" else min(copies, 1))
    return Cost("quantize_weights", flops, size * itemsize + copies * (size + scales))


def order_rows(R: int, E: int, itemsize: int, probs: int) -> Cost:
    """Reads ids `[R]`, writes offsets `[E + 1]`, row ids and places `[R]`; copies probs `[R]`; `itemsize` of ids."""
    return Cost("order_rows", 0, itemsize * R + _INT32 * (E + 1 + 2 * R) + 2 * probs * R)


def combine(T: int, K: int, H: int, itemsize: int) -> Cost:
    """Reads y `[T * K, H]` and rows `[T * K]`, writes `[T, H]`."""
    return Cost("combine", T * K * H, itemsize * (T * K + T) * H + _INT32 * T * K)


def spread(T: int, K: int, H: int, itemsize: int) -> Cost:
    """Reads x `[T, H]` and rows `[T * K]`, writes `[T * K, H]`."""
    return Cost("spread", 0, itemsize * (T * K + T) * H + _INT32 * T * K)


def _read(R: int, columns: int, itemsize: int, tokens: int | None) -> int:
    """Bytes of `[R, columns]`, or of its tokens and the index."""
    return itemsize * R * columns if tokens is None else itemsize * min(tokens, R) * columns + _INT32 * R


def _used(rows: Sequence[int]) -> int:
    return sum(n > 0 for n in rows)


def _channels(F: int, gated: bool) -> int:
    return 2 * F if gated else F


def _copies(rows: Sequence[int], C: int, row_copy: bool, token_copy: bool) -> tuple[int, int]:
    """Multiplications and bytes of copies of a matrix `[R, C]`; see `quantize`."""
    R, tiles = sum(rows), sum(cdiv(n, TILE_ROWS) for n in rows)
    scales = 512 * tiles * cdiv(C, CHUNK)
    written = row_copy * (R * C + scales) + token_copy * (TILE_ROWS * tiles * C + scales)
    return R * C * (row_copy + token_copy), written
