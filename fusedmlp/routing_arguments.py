"""Checks the arguments of the public functions that say which rows an expert gets, and with what probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fusedmlp import debug, validate
from fusedmlp.validate import Input

_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MAX_ROWS = 2**31 - 1  # kernels number rows in int32
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # few operators take these


def counts(tokens_per_expert: object, num_experts: int, x: Input) -> Tensor:
    """Check `tokens_per_expert`; return it as an integer tensor `[E]`. The operator checks its values."""
    name = "tokens_per_expert"
    if isinstance(tokens_per_expert, Tensor):
        tensor = _integers(name, tokens_per_expert)
    elif isinstance(tokens_per_expert, Sequence) and all(type(n) is int for n in tokens_per_expert):
        tensor = torch.tensor(tokens_per_expert, dtype=torch.int64, device="cpu")
    else:
        tensor = _numpy_integers(name, tokens_per_expert)
    compiling = torch.compiler.is_compiling()
    if compiling and _may_have_length(tensor, num_experts):
        torch._check(tensor.shape[0] == num_experts)  # by the graph when it runs, for a size that `bincount` made
    elif tuple(tensor.shape) != (num_experts,):
        raise ValueError(f"{name}: expected shape ({num_experts},), a count for each expert; got {tuple(tensor.shape)}")
    on_host = x.tensor.is_cuda and not tensor.is_cuda and not compiling
    if on_host and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: expected a tensor on {x.tensor.device} while a CUDA graph is captured, which would replay with "
            "whatever the host's memory then holds; got counts on the host"
        )
    if debug.enabled:
        debug.check_counts(tensor, x.tensor.shape[0])
    try:
        return tensor.contiguous()
    except RuntimeError:
        validate.refuse_sparse(name, tensor)
        raise


def _may_have_length(tensor: Tensor, length: int) -> bool:
    """Compare the shape of a traced tensor with `[length]`; true also if only a run of the graph knows its size."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # imports sympy, which eager code does without

    return tensor.dim() == 1 and guard_or_true(tensor.shape[0] == length)


def _numpy_integers(name: str, value: Any) -> Tensor:
    """A tensor of NumPy's integers: an array, or a sequence in which there are some. This file needs no NumPy."""
    array = hasattr(value, "__array_interface__") and getattr(value, "ndim", 0) > 0
    if array and value.dtype.kind in "iu":
        return torch.tensor(value.tolist(), dtype=torch.int64, device="cpu")
    if isinstance(value, Sequence) and all(isinstance(n, Integral) and not isinstance(n, bool) for n in value):
        return torch.tensor([*map(int, value)], dtype=torch.int64, device="cpu")
    raise TypeError(f"{name}: expected an integer tensor or a list of int; got {validate.kind(value)}")


def probabilities(probs: object, x: Input) -> Tensor | None:
    """Check `probs`; return it as `[R]`."""
    if probs is None:
        return None
    if not isinstance(probs, Tensor):
        raise TypeError(f"probs: expected a tensor or None; got {validate.kind(probs)}")
    num_rows = x.tensor.shape[0]
    if tuple(probs.shape) not in ((num_rows,), (num_rows, 1)):
        advice = " (for choices of tokens: GroupedMLP.forward_tokens, or moe_experts)" if probs.dim() == 2 else ""
        raise ValueError(f"probs: expected shape ({num_rows},) or ({num_rows}, 1); got {tuple(probs.shape)}{advice}")
    _floating("probs", probs, x)
    validate.plain("probs", probs)
    try:
        return (probs if probs.dim() == 1 else probs.reshape(-1)).contiguous()
    except RuntimeError:
        validate.refuse_sparse("probs", probs)
        raise


def choices(top_k_index: object, top_k_weights: object, x: Input) -> tuple[Tensor, Tensor]:
    """Check the expert ids and weights of every token, both `[T, K]`."""
    if not isinstance(top_k_index, Tensor):
        raise TypeError(f"top_k_index: expected a tensor; got {validate.kind(top_k_index)}")
    if not isinstance(top_k_weights, Tensor):
        raise TypeError(f"top_k_weights: expected a tensor; got {validate.kind(top_k_weights)}")
    num_tokens = x.tensor.shape[0]
    if top_k_index.dim() != 2 or top_k_index.shape[0] != num_tokens or top_k_index.shape[1] == 0:
        raise ValueError(
            f"top_k_index: expected shape [T, K] with T = {num_tokens}, the tokens of {x.name}, and K > 0; got "
            f"{tuple(top_k_index.shape)}"
        )
    if top_k_index.numel() > _MAX_ROWS:
        raise ValueError(f"top_k_index: expected at most {_MAX_ROWS} ids; got {top_k_index.numel()}")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights: expected shape {tuple(top_k_index.shape)}, that of top_k_index; got "
            f"{tuple(top_k_weights.shape)}"
        )
    ids = _integers("top_k_index", validate.plain("top_k_index", top_k_index))
    validate.same_device("top_k_index", top_k_index, x)
    _floating("top_k_weights", top_k_weights, x)
    validate.plain("top_k_weights", top_k_weights)
    try:
        return ids.contiguous(), top_k_weights.contiguous()
    except RuntimeError:
        validate.refuse_sparse("top_k_index", ids)
        validate.refuse_sparse("top_k_weights", top_k_weights)
        raise


def refuse_padding(tokens_per_expert: Tensor | Sequence[int], num_rows: int) -> None:
    """Raise ValueError if some of `num_rows` rows belong to no expert; on a GPU an assertion on the device fails."""
    try:
        total = tokens_per_expert.long().sum() if isinstance(tokens_per_expert, Tensor) else int(sum(tokens_per_expert))
    except TypeError:
        return  # no counts at all: `counts` says so
    _require(total == num_rows, f"tokens_per_expert: expected a sum of {num_rows} (rows of x), for strict=True", total)


def refuse_foreign_ids(top_k_index: Tensor, num_experts: int) -> None:
    """Raise ValueError if an id is of no expert here; on a GPU an assertion on the device fails."""
    if isinstance(top_k_index, Tensor):
        outside = ((top_k_index < 0) | (top_k_index >= num_experts)).sum()
        _require(outside == 0, f"top_k_index: expected ids in [0, {num_experts}), for strict=True", outside, " outside")


def _require(condition: Tensor | bool, message: str, got: Tensor | int, unit: str = "") -> None:
    if isinstance(condition, Tensor) and (torch.compiler.is_compiling() or condition.device.type != "cpu"):
        if condition.device.type != "meta":
            torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(f"{message}; got {int(got)}{unit}")


def _integers(name: str, tensor: Tensor) -> Tensor:
    """Check for integers; return them in a dtype that operators take."""
    if tensor.dtype in _WIDE_UNSIGNED:
        return tensor.long()
    if tensor.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{name}: expected an integer dtype; got {tensor.dtype}")
    return tensor


def _floating(name: str, tensor: Tensor, x: Input) -> None:
    if tensor.dtype not in validate.FLOAT_DTYPES:
        raise TypeError(f"{name}: expected dtype {validate.names(validate.FLOAT_DTYPES)}; got {tensor.dtype}")
    validate.same_device(name, tensor, x)
