"""Bounds, by element, of what sums of products lose in fp32 accumulators; `tolerance.py` has the rule for the rest.

A tensor core adds all products of one instruction and the accumulator at once [Xie et al., MMA-Sim, arXiv:2511.10909].
E is the largest exponent among these terms. Of each term, bits below q = 2^(E - term_bits) are dropped; the rest is
added exactly; then bits of the sum s below u(s) = 2^(floor(log2 |s|) - sum_bits) are dropped. So one instruction of
`depth` products loses less than

    sum over its terms t of (|t| mod q)  +  u(s)    <=    ((depth + 1) 2^-term_bits + 2^-sum_bits) m

where m is the largest magnitude of a term or of the sum, and a sum over R rows takes R / depth instructions. Losses
have the signs of the terms and of the sum, so same-sign terms lose half of the bound on average. An fp32 multiply-add
rounds instead: errors of either sign, which a sum over R rows keeps below 6 standard deviations,
6 sqrt(R / 12) 2^-23 m.

The functions below add up what each instruction may lose, with its own terms and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cases.experts import DEVICE
from fusedmlp.kernels.tiles import select

TRUNCATES = DEVICE == "cuda"  # not in the interpreter, and in the emulator on request only
FP32_BITS = 23  # of the fraction
CHUNK = 16  # products that `rounded` takes at a time


class Sums(NamedTuple):
    """Precision of the sums of one instruction, in bits of fraction."""

    depth: int  # products
    term_bits: int
    sum_bits: int


def sums_of(bits: int) -> Sums | None:
    """Sums of products of operands of 8, 16 or 32 bits on the device; None: fp32 multiply-adds, one by one."""
    if not TRUNCATES or bits == 32:
        return None
    architecture = select.target(torch.device(DEVICE), None, torch.bfloat16).architecture
    if bits == 8:
        return Sums(32, 13, 13) if architecture == "sm_90" else Sums(32, 25, FP32_BITS)
    return Sums(8, 24, FP32_BITS) if architecture == "sm_80" else Sums(16, 25, FP32_BITS)


def lost(left_RN: Tensor, right_RK: Tensor, sums: Sums | None, block: int = 0) -> Tensor:
    """The most by which each element of `left^T right`, `[N, K]`, may be off.

    `block`: rows whose sum is then scaled and added in fp32 registers; 0: all rows are added in the accumulator.
    """
    bound = left_RN.new_zeros(left_RN.shape[1], right_RK.shape[1], dtype=torch.float64)
    total = bound.clone()
    if not len(left_RN):
        return bound
    block = block or len(left_RN)
    for left, right in zip(left_RN.double().split(block), right_RK.double().split(block), strict=True):
        of_block, off_by = rounded(left, right) if sums is None else truncated(left, right, sums)
        total += of_block
        bound += off_by
        if block < len(left_RN):  # two roundings, each of half a unit at most; the other half is for `bound` itself
            bound += _unit(of_block.abs(), FP32_BITS) + _unit(total.abs(), FP32_BITS)
    return bound


def whole(rows: Tensor, depth: int) -> Tensor:
    """The rows, and zeros up to a multiple of `depth`: kernels fill the last instruction of an expert with them."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % depth))


def truncated(left_RN: Tensor, right_RK: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
    """`(left^T right, the most by which each element may be off)`, if instructions truncate."""
    total = left_RN.new_zeros(left_RN.shape[1], right_RK.shape[1])
    bound = total.clone()
    for left, right in _parts(left_RN, right_RK, sums.depth):
        terms = left[:, :, None] * right[:, None, :]
        before = total.abs() + bound
        q = _unit(torch.maximum(terms.abs().amax(0), before), sums.term_bits)
        total += terms.sum(0)
        bound += terms.fmod(q).abs().sum(0) + torch.minimum(before, q)
        bound += _unit(total.abs() + bound, sums.sum_bits)
    return total, bound


def rounded(left_RN: Tensor, right_RK: Tensor) -> tuple[Tensor, Tensor]:
    """`(left^T right, the most by which each element may be off)`, if each multiply-add rounds to nearest."""
    total = left_RN.new_zeros(left_RN.shape[1], right_RK.shape[1])
    variance = total.clone()
    for left, right in _parts(left_RN, right_RK, CHUNK):
        largest = total.abs() + left.abs().T @ right.abs()
        variance += len(left) * (2.0**-FP32_BITS * largest) ** 2 / 12
        total += left.T @ right
    return total, 6 * variance.sqrt()


def _parts(left_RN: Tensor, right_RK: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many rows of both at a time; not those of zeros, which fill tiles and change no sum."""
    for left, right in zip(left_RN.split(rows), right_RK.split(rows), strict=True):
        if left.any() and right.any():
            yield left, right


def _unit(size: Tensor, bits: int) -> Tensor:
    """The last bit of numbers of this size with so many bits of fraction; of zero, one of no account."""
    return torch.ldexp(torch.ones_like(size), torch.frexp(size.clamp(min=2.0**-900)).exponent - 1 - bits)
