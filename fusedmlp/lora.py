"""Low-rank adapters of experts: `W x + scaling * B (A x)`, without a tensor as large as the weights.

Source: LoRA, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmlp import validate
from fusedmlp.contract.checks import grad_dtype
from fusedmlp.validate import ExpertWeight, Input

MOST = 128  # the largest rank
_MULTIPLES = {"torch": 1, "triton": 16}  # of ranks: kernels need whole vectors; the rest is filled with zeros


class LoRA(NamedTuple):
    """An adapter of the weights of all experts, for `fc1_lora`, `fc2_lora` and `lora` of the public functions.

    `A` and `B` get gradients of their own dtype, which need not be that of the weights: products are in the dtype that
    the layer computes in, and their gradients are summed in float32.

    Attributes:
        A: `[E, r, in]`, float32, bfloat16 or float16; `r` is at most 128.
        B: `[E, out, r]`, dtype of A.
        scaling: factor of the adapter's product.
    """

    A: Tensor
    B: Tensor
    scaling: float = 1.0


def check(name: str, given: object, weight: ExpertWeight, x: Input) -> list[Tensor]:
    """Check an adapter of this weight; return `[A, B]`, or an empty list without one."""
    if given is None:
        return []
    if not isinstance(given, LoRA):
        raise TypeError(f"{name}: expected a fusedmlp.LoRA or None; got {validate.kind(given)}")
    for label, tensor in (("A", given.A), ("B", given.B)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in validate.FLOAT_DTYPES:
            got = tensor.dtype if isinstance(tensor, Tensor) else validate.kind(tensor)
            raise TypeError(f"{name}.{label}: expected a tensor of {validate.names(validate.FLOAT_DTYPES)}; got {got}")
        validate.plain(f"{name}.{label}", tensor)
        validate.same_device(f"{name}.{label}", tensor, x)
    if given.B.dtype != given.A.dtype:
        raise TypeError(f"{name}.B: expected dtype {given.A.dtype}, that of A; got {given.B.dtype}")
    rank = given.A.shape[1] if given.A.dim() == 3 else 0
    expected = (weight.num_experts, rank, weight.in_features), (weight.num_experts, weight.out_features, rank)
    if not 0 < rank <= MOST or given.A.shape != expected[0]:
        raise ValueError(
            f"{name}.A: expected shape [{weight.num_experts}, r, {weight.in_features}] with r from 1 to {MOST}; got "
            f"{tuple(given.A.shape)}"
        )
    if given.B.shape != expected[1]:
        raise ValueError(f"{name}.B: expected shape {expected[1]}; got {tuple(given.B.shape)}")
    if isinstance(given.scaling, Tensor) or not isinstance(given.scaling, (int, float)):
        raise TypeError(f"{name}.scaling: expected a number; got {validate.kind(given.scaling)}")
    return [given.A, given.B]


def computed(adapter: list[Tensor], scaling: float, dtype: torch.dtype, transposed: bool, impl: str) -> list[Tensor]:
    """`[scaling * A, B]` as operators take them, in the dtype that a layer computes in.

    For kernels both lie as the weights: if those are `transposed`, `[E, in, out]`, as `[E, in, r]` and `[E, r, out]`.
    On the CPU both have rows of the layer's width, which is up to twice as fast.
    """
    A, B = adapter
    A, B, missing = (A * scaling).to(dtype), B.to(dtype), _missing(A, impl)
    if missing:
        A, B = F.pad(A, (0, 0, 0, missing)), F.pad(B, (0, missing))
    flipped = (transposed, transposed) if impl == "triton" else (False, True)
    return [w.mT.contiguous().mT if flip else w.contiguous() for w, flip in zip((A, B), flipped, strict=True)]


def outs_like(adapter: list[Tensor], impl: str) -> list[Tensor]:
    """Uninitialised float32 outputs for the gradients of what `computed` returns."""
    A, B = adapter
    num_experts, rank, columns = A.shape
    rank += _missing(A, impl)
    shapes = (num_experts, rank, columns), (num_experts, rank, B.shape[1])
    dA, dB = (A.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return [dA, dB.mT if impl == "torch" else dB.view(num_experts, B.shape[1], rank)]


def returned(outs: list[Tensor], adapter: list[Tensor], scaling: float) -> list[Tensor | None]:
    """Gradients of A and B, from `outs_like` that operators wrote; None for each without them."""
    if not outs:
        return [None] * len(adapter)
    rank, dtype = adapter[0].shape[1], grad_dtype(adapter[0])
    return [outs[0][:, :rank].mul_(scaling).to(dtype), outs[1][:, :, :rank].to(dtype)]


def _missing(A: Tensor, impl: str) -> int:
    return -A.shape[1] % _MULTIPLES[impl]
