"""Checks the arguments of `MainGradBuffer` and `WgradQueue`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedmlp.contract.engine import is_plain
from fusedmlp.contract.owners import fsdp2

_EXPECTED = "an iterable of parameters, such as model.parameters()"


def listed(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters as a list; raises for what is often passed in their place."""
    given: Any = params
    if isinstance(given, nn.Module):
        raise TypeError(f"params: expected {_EXPECTED}; got a module, {type(given).__name__}: pass its .parameters()")
    if isinstance(given, Tensor):
        raise TypeError(f"params: expected {_EXPECTED}; got a single tensor of shape {tuple(given.shape)}: pass [it]")
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"params: expected {_EXPECTED}; got {type(given).__name__} {given!r}"[:200])
    listed_params = list(given)
    for i, param in enumerate(listed_params):
        if isinstance(param, tuple) and len(param) == 2 and isinstance(param[1], Tensor):
            raise TypeError(
                f"params: expected {_EXPECTED}; got named parameters, the first of them {param[0]!r}: pass "
                "model.parameters() in place of model.named_parameters()"
            )
        if not isinstance(param, Tensor):
            raise TypeError(f"params[{i}]: expected a parameter; got {type(param).__name__} {param!r}"[:200])
    return listed_params


def check(params: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Check parameters and the dtype of the buffer."""
    if not params:
        raise ValueError("params: expected at least one parameter; got none")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "MainGradBuffer: expected to be made outside of torch.inference_mode(), as no backward could write to the "
            "memory that is made in it"
        )
    first: dict[int, int] = {}  # index by id
    for i, param in enumerate(params):
        if first.setdefault(id(param), i) < i:
            raise ValueError(f"params[{i}]: expected each parameter once; got params[{first[id(param)]}] again")
        if not param.is_leaf or not param.requires_grad:
            frozen = "one that does not (of a model that is partly frozen, pass the parameters that require grad)"
            got = frozen if param.is_leaf else f"the result of {param.grad_fn}"
            raise ValueError(f"params[{i}]: expected a leaf that requires grad; got {got}")
        if not is_plain(param):
            raise ValueError(f"params[{i}]: expected a plain tensor; got a {type(param).__name__} ({fsdp2.SHARDED})")
        if getattr(param, "_is_flat_param", False):  # which changes its size between forward and step
            raise ValueError(
                f"params[{i}]: expected a parameter that keeps its size; got a FlatParameter of FSDP1 (wrap with "
                "use_orig_params=True, or make no buffer)"
            )
        if param.layout is not torch.strided:
            raise ValueError(f"params[{i}]: expected a dense tensor; got one in {param.layout}")
        if param.is_meta:
            raise ValueError(
                f"params[{i}]: expected memory; got a meta tensor: make the buffer after to_empty() or loading"
            )
        if param.device != params[0].device:
            raise ValueError(f"params[{i}]: expected device {params[0].device}; got {param.device}")
        if dtype not in (torch.float32, param.dtype):
            raise ValueError(f"dtype: expected torch.float32 or params[{i}]'s {param.dtype}; got {dtype}")
        if getattr(param, "main_grad", None) is not None:
            raise ValueError(
                f"params[{i}]: expected no main_grad yet; got that of another owner (of a "
                "MainGradBuffer, call its detach() first)"
            )


def check_max_norm(max_norm: float | Tensor) -> None:
    """Check a limit of norms. One on a GPU is not read, as that would wait for it."""
    if isinstance(max_norm, Tensor) and not max_norm.is_cpu:
        return
    try:
        limit = float(max_norm)
    except (TypeError, ValueError, RuntimeError):
        limit = math.nan
    if not limit >= 0 or isinstance(max_norm, str):
        raise ValueError(f"max_norm: expected a number of at least 0; got {max_norm!r}")
