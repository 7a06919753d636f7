"""Arguments of operators and launchers, as plans see them: arrays in place of tensors.

An operator takes tensors, lists of all experts' tensors, the elements and scales of a quantized copy as a list of two
(`Quantized`), the two factors of an adapter as a list, tuples of segments' tensors, and constants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operands.arrays import Array, kind_of
from ..operands.expert_tensors import ExpertTensors
from ..operands.quantized import Quantized, is_quantized

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_CONSTANTS = frozenset((type(None), bool, int, str))


class Arguments(NamedTuple):
    """Arguments of an operator."""

    kinds: tuple[Any, ...]  # for each argument, all that a plan sees of it
    tensors: list[Tensor]  # the sources of a program, in its order
    addresses: list[int]  # of the tensors

    @staticmethod
    def of(args: Sequence[Any]) -> Arguments:
        """Describe the arguments of a call. Every call of an operator takes this time."""
        kinds: list[Any] = []
        tensors: list[Tensor] = []
        addresses: list[int] = []
        for arg in args:
            type_of = type(arg)
            if type_of in _CONSTANTS:
                kinds.append(arg)
                continue
            if type_of in _TENSORS:
                tensor = arg
            elif type_of is list and len(arg) == 1:
                (tensor,) = arg
            elif isinstance(arg, (list, tuple)):
                kinds.append(_kinds_of_many(arg, tensors, addresses) if arg else ())
                continue
            elif isinstance(arg, Tensor):
                tensor = arg
            else:
                raise TypeError(f"operator: expected a tensor, a list, a tuple, None, a bool, int or str; got {arg!r}")
            tensors.append(tensor)
            address = tensor.data_ptr()
            addresses.append(address)
            kinds.append((tensor.shape, tensor.stride(), tensor.dtype, address & 15))
        return Arguments(tuple(kinds), tensors, addresses)


def _kinds_of_many(arg: Sequence[Tensor], tensors: list[Tensor], addresses: list[int]) -> tuple[Any, ...]:
    """One kind for a list of several experts' tensors; a kind for each tensor of a copy or of a tuple of segments."""
    kinds: tuple[Any, ...]
    if is_quantized(arg) or _are_factors(arg):
        parts, kinds = [*arg], tuple(map(kind_of, arg))
    elif type(arg) is list:
        experts = ExpertTensors.of(arg, arg[0].dim())
        base, table, *rest = experts
        parts = [base] if table is None else [base, table]
        kinds = (kind_of(base), None if table is None else kind_of(table), *rest)
    else:
        parts, lowest = [*arg], _lowest(arg)
        kinds = tuple((*kind_of(t), _distance(t, lowest) if t.is_floating_point() else 0) for t in arg)
    tensors += parts
    addresses += map(Tensor.data_ptr, parts)
    return kinds


def _are_factors(arg: Sequence[Tensor]) -> bool:
    """Whether a list of several tensors has an adapter's factors, of all experts each, and not one tensor an expert."""
    return type(arg) is list and arg[0].dim() == 3


def seen(kinds: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Arguments as a plan sees them: arrays in place of tensors, and `ExpertTensors` of arrays in place of lists of
    several experts' tensors.
    """
    count = 0

    def array(kind: Any) -> Array:
        nonlocal count
        count += 1
        shape, strides, dtype, address, *distance = kind
        return Array(shape, strides, dtype, address, count - 1, 0, *distance)

    as_seen: list[Any] = []
    for kind, arg in zip(kinds, args, strict=True):
        if type(arg) is list and len(arg) == 1:
            as_seen.append([array(kind)])
        elif isinstance(arg, Tensor):
            as_seen.append(array(kind))
        elif is_quantized(arg):
            as_seen.append(Quantized(*map(array, kind)))
        elif type(arg) is list and arg and not _are_factors(arg):
            base, table, *rest = kind
            base = array(base)
            as_seen.append(ExpertTensors(base, None if table is None else array(table), *rest))
        elif isinstance(arg, (list, tuple)):
            as_seen.append([*map(array, kind)])
        else:
            as_seen.append(kind)
    return as_seen


class AroundTensor(ABC):
    """An argument that is not a tensor itself, but holds one: `routing.plan.Schedule`."""

    @abstractmethod
    def with_tensor(self, replaced: Callable[[Any], Any]) -> Any:
        """The same around `replaced(tensor)`."""


def described(value: Any, tensors: list[Tensor]) -> Any:
    """Replace tensors by arrays, also in named tuples, lists of segments and schedules; append them to `tensors`:
    the sources of the arrays.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Array(*kind_of(value), len(tensors) - 1)
    if hasattr(value, "_make"):
        return value._make([described(part, tensors) for part in value])
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        lowest = _lowest(value)
        return [replace(described(part, tensors), distance=_distance(part, lowest)) for part in value]
    if isinstance(value, AroundTensor):
        return value.with_tensor(lambda tensor: described(tensor, tensors))
    return value


def _lowest(segments: Sequence[Tensor]) -> int:
    """Lowest address of the segments that have rows."""
    return min((t.data_ptr() for t in segments if t.shape[0]), default=0)


def _distance(segment: Tensor, lowest: int) -> int:
    """Bytes from the lowest segment; 0 without rows, as nothing is read then."""
    return segment.data_ptr() - lowest if segment.shape[0] else 0
