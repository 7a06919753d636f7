"""What is remembered of an operator's launches, and how they are made again: see `launching/replay.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from ..operands.descriptors import Descriptor
from ..operands.expert_tensors import ExpertTensors
from ..tiles.configs import dot_precision
from .launcher import Direct, encode

_MOST = 1024  # tensor maps of one descriptor that are kept: one for each layer's weights
_TENSORS, _CONSTANTS = (Tensor, torch.nn.Parameter), (type(None), bool, int, str)


class Arguments(NamedTuple):
    """The arguments of one call."""

    kind: tuple[Any, ...]  # all that launchers look at, the driver and the current device first
    tensors: list[Tensor | ExpertTensors]
    addresses: list[int]  # where they start
    device: torch.device

    @staticmethod
    def of(args: Sequence[Any]) -> Arguments | None:
        """None for arguments of other types, or without a tensor of its own."""
        active = driver.active
        kind: list[Any] = [active, active.get_current_device()]
        tensors: list[Tensor | ExpertTensors] = []
        addresses: list[int] = []
        first = None
        for arg in args:
            if type(arg) in _TENSORS:
                if first is None:
                    first = arg
                own: Any = arg
            elif type(arg) in _CONSTANTS:
                kind.append(arg)
                continue
            elif type(arg) is list:
                kind.append(len(arg))
                if not arg:
                    continue
                own = arg[0]
                if type(own) not in _TENSORS:
                    return None
            else:
                return None
            address = own.data_ptr()
            kind += (own.shape, own.stride(), own.dtype, address & 15)
            if type(arg) is list and len(arg) > 1:
                experts = own = ExpertTensors.of(arg, own.dim())
                kind += (experts.stride_e, experts.aligned, experts.table is None)
                if experts.table is not None:
                    tensors.append(experts.table)
                    addresses.append(experts.table.data_ptr())
                    kind.append(addresses[-1] & 15)
            tensors.append(own)
            addresses.append(address)
        if first is None:
            return None
        kind.append(dot_precision(first.dtype))
        return Arguments(tuple(kind), tensors, addresses, first.device)


class TensorMaps(NamedTuple):
    """Of one descriptor of a launch, by address; all else about it is the kind's."""

    descriptor: Descriptor
    encoding: Any
    known: dict[int, Any]

    def at(self, address: int) -> Any:
        """The encoded map of memory that starts there."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _MOST:
                self.known.clear()
            found = self.known[address] = encode(self.descriptor._replace(address=address), self.encoding)[0]
        return found


class Step(NamedTuple):
    """One launch of an operator."""

    kernel: Any
    direct: Direct
    grid: Sequence[int]
    values: list[Any]  # as the kernel takes them; addresses and tensor maps are to be filled in
    addresses: list[tuple[int, int, int]]  # place in `values`, whose address (arguments, then made), bytes past it
    maps: list[tuple[int, int, int, TensorMaps]]


class Recipe(NamedTuple):
    """What an operator allocates, launches and returns."""

    allocated: list[tuple[torch.Size, torch.dtype]]
    steps: list[Step]
    results: Any  # which of the allocated tensors: None, one, or a named tuple

    def allocate(self, arguments: Arguments) -> list[Tensor] | None:
        """None if kernels would have to be others: for memory that is not aligned, or hooks that a kernel has now."""
        device = arguments.device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.allocated]
        bits = 0
        for tensor in made:
            bits |= tensor.data_ptr()
        hooked = any(step.kernel.pre_run_hooks for step in self.steps)
        return None if bits & 15 or hooked else made

    def launch(self, arguments: Arguments, made: list[Tensor]) -> Any:
        """Returns what the operator does."""
        addresses = [*arguments.addresses, *map(Tensor.data_ptr, made)]
        stream = driver.active.get_current_stream(arguments.kind[1])
        for _, direct, grid, template, places, maps in self.steps:
            values = template.copy()
            for place, source, offset in places:
                values[place] = addresses[source] + offset
            for place, source, offset, tensor_maps in maps:
                values[place] = tensor_maps.at(addresses[source] + offset)
            direct.launch(grid, stream, values)
        results = self.results
        if results is None:
            return None
        if type(results) is int:
            return made[results]
        return results._make([None if index is None else made[index] for index in results])
