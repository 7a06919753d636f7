"""Facts about all parameters of a weight in a buffer, found out once and kept until somebody changes a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmlp.contract.checks import are_alike
from fusedmlp.contract.memory import lent
from fusedmlp.contract.parameter_state import find_state, find_states

_GRAD, _SHAPE, _HOOKS = attrgetter("grad"), attrgetter("shape"), attrgetter("_backward_hooks")
_COMPILED_IN = attrgetter("compiled_in")
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class WeightGroup(NamedTuple):
    """The parameters of one weight, each with memory of a buffer that one GEMM can write for all."""

    memory: list[Tensor]
    shapes: list[torch.Size]

    def stores(self, params: Sequence[Tensor]) -> bool | None:
        """Tell whether the GEMM overwrites the memory (True: every `.grad` is None) or adds (False: the memory is every
        `.grad`). None: ask for each parameter, as another `.grad`, a hook, a graph or another shape is in the way.
        """
        if [*map(_SHAPE, params)] != self.shapes or any(map(_HOOKS, params)):
            return None
        if any(map(_COMPILED_IN, find_states(params))):
            return None
        grads = [*map(_GRAD, params)]
        if all(map(is_, grads, self.memory)):
            return False
        return True if all(map(is_, grads, repeat(None))) else None

    def has_late_hooks(self, params: Sequence[Tensor]) -> bool:
        """Tell whether a parameter has a post-accumulate-grad hook beside that of memory.py."""
        return max(map(len, filter(None, map(_LATE_HOOKS, params))), default=0) > 1


def group_of(params: Sequence[Tensor]) -> WeightGroup | None:
    """The group of these parameters, kept from an earlier call if nothing has changed. None: ask them one by one."""
    state = None if torch.compiler.is_compiling() else find_state(params[0])
    if state is None or state.memory is None:
        return None
    group: WeightGroup | None = state.group
    if (
        group is None
        or len(group.memory) != len(params)
        or not all(map(is_, map(getattr, params, repeat("main_grad"), repeat(None)), group.memory))
        or params[0].device != group.memory[0].device
    ):
        memory = [part for part in lent(params) if part is not None]
        distinct = len({*map(id, memory)}) == len(params)
        alike = distinct and are_alike(memory) and params[0].device == memory[0].device
        group = state.group = WeightGroup(memory, [*map(_SHAPE, memory)]) if alike else None
    return group
