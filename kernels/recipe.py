"""What is remembered of an operator's launches, and how they are made again: see `replay.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from .configs import dot_precision
from .descriptors import Descriptor
from .expert_tensors import ExpertTensors
from .launcher import Direct, encode

MOST = 1024  # kinds of calls of one operator, and tensor maps of one descriptor, that are kept
UNKNOWN: Any = object()
_TENSORS, _CONSTANTS = (Tensor, torch.nn.Parameter), (type(None), bool, int, str)


class Call(NamedTuple):
    """The arguments of one call."""

    kind: tuple[Any, ...]  # all that launchers look at
    tensors: list[Tensor | ExpertTensors]
    addresses: list[int]  # of what `kind` leaves out: first of all tensors
    device: torch.device

    @staticmethod
    def of(args: Sequence[Any]) -> Call | None:
        """None for arguments of other kinds, or without a tensor."""
        active = driver.active
        kind: list[Any] = [active, active.get_current_device()]
        tensors: list[Tensor | ExpertTensors] = []
        addresses: list[int] = []
        own = None
        for arg in args:
            tensor = arg
            if type(arg) is list:
                kind.append(len(arg))
                if not arg:
                    continue
                tensor = arg[0]
                if len(arg) > 1:
                    experts = ExpertTensors.of(arg, tensor.dim())
                    kind += (experts.stride_e, experts.aligned, experts.table is None)
                    if experts.table is not None:
                        tensors.append(experts.table)
                        addresses.append(experts.table.data_ptr())
                    tensors.append(experts)
            elif type(arg) in _CONSTANTS:
                kind.append(arg)
                continue
            elif own is None:
                own = arg
            if type(tensor) not in _TENSORS:
                return None
            address = tensor.data_ptr()
            kind += (tensor.shape, tensor.stride(), tensor.dtype, address & 15)
            if type(arg) is not list or len(arg) == 1:
                tensors.append(tensor)
            addresses.append(address)
        if own is None:
            return None
        kind.append(dot_precision(own.dtype))
        return Call(tuple(kind), tensors, addresses, own.device)


class TensorMaps(NamedTuple):
    """Of one descriptor of a launch, by address; all else about it is the kind's."""

    descriptor: Descriptor
    encoding: Any
    known: dict[int, Any]

    def at(self, address: int) -> Any:
        """The encoded map of memory that starts there."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= MOST:
                self.known.clear()
            found = self.known[address] = encode(self.descriptor._replace(address=address), self.encoding)[0]
        return found


class Launch(NamedTuple):
    """One launch of an operator."""

    kernel: Any
    direct: Direct
    grid: Sequence[int]
    values: list[Any]  # as the kernel takes them; addresses and tensor maps are to be filled in
    addresses: list[tuple[int, int, int]]  # place in `values`, which of a call's addresses, bytes past it
    maps: list[tuple[int, int, int, TensorMaps]]


class Recipe(NamedTuple):
    """What an operator allocates, launches and returns."""

    allocated: list[tuple[torch.Size, torch.dtype]]
    launches: list[Launch]
    results: Any  # which of the allocated tensors: None, one, or a named tuple

    def run(self, call: Call) -> Any:
        """What the operator returns; `UNKNOWN` if this call is of another kind after all."""
        addresses, device = call.addresses, call.device
        made, bits = [], 0
        for shape, dtype in self.allocated:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            address = tensor.data_ptr()
            bits |= address
            made.append(tensor)
            addresses.append(address)
        if bits & 15 or any(launch.kernel.pre_run_hooks for launch in self.launches):
            return UNKNOWN
        stream = driver.active.get_current_stream(call.kind[1])
        for _, direct, grid, template, places, maps in self.launches:
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
