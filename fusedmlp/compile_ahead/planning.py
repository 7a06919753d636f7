"""Plans what a layer would launch on a GPU, while the layer runs on tensors without memory.

Layers run as in training: autograd, the gradient contract and the queue decide which operators are called, with what.
PyTorch's `FakeTensorMode` stands for the memory, and `Planning` for the operators: in place of running one it plans the
program that the `triton` implementation would run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmlp.kernels.launching import direct
from fusedmlp.kernels.launching.arguments import Arguments
from fusedmlp.kernels.launching.program import Allocation, Launch, Program
from fusedmlp.kernels.launching.run import Operator
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.descriptors import Descriptor
from fusedmlp.kernels.tiles.select import Target
from fusedmlp.operators import triton_impl

# Operators whose function in `triton_impl` only calls another one. `grouped_wgrad_` makes tuples of lists of segments.
_RUN_BY = {"expert_offsets": triton_impl.checked_plan, "grouped_wgrad_": triton_impl.wgrad_of_segments_}
_SEGMENTS = range(2, 7)  # arguments of `grouped_wgrad_` that have a tensor for each segment
_APART = 2**20  # bytes between the end of an allocation and the next


class Planned(NamedTuple):
    """A launch, and the bytes of its program's sources."""

    launch: Launch
    storage_bytes: list[int]


class Planning(TorchDispatchMode):
    """Inside it, fusedmlp's operators are planned for `targets` in place of being run. It goes into a `FakeTensorMode`,
    and that into `compiling_for`.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts_on_host = False  # whether counts of rows are made first rows on the host, as those in a list are
        self.planned: dict[Any, Planned] = {}  # by the kind of compiled kernel: launches with equal kinds share one
        self._targets = targets
        self._described: dict[Any, Tensor] = {}
        self._storages: dict[int, tuple[int, Any]] = {}  # address, and what keeps the key from another storage
        self._free = 2**40

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Plan an operator of fusedmlp; run any other one, for the kinds of its results."""
        if func.namespace != "fusedmlp" or (func._opname == "expert_offsets" and self.counts_on_host):
            return func(*args, **(kwargs or {}))
        *given, _ = args
        with unset_fake_temporarily():
            arguments = [self._as_planned(arg) for arg in given]
            if func._opname == "grouped_wgrad_":
                arguments = [tuple(a) if i in _SEGMENTS else a for i, a in enumerate(arguments)]
            program = self._plan(func._opname, arguments)
        results = _results(program)
        return results[0] if func._opname == "expert_offsets" else results

    def _plan(self, name: str, arguments: list[Any]) -> Program:
        operator = _RUN_BY.get(name) or getattr(triton_impl, name)
        if not isinstance(operator, Operator):
            raise TypeError(f"{name}: expected an Operator of triton_impl; got {operator!r}")
        sources = [tensor.untyped_storage().nbytes() for tensor in Arguments.of(arguments).tensors]
        for target in self._targets:
            program = operator.program(target, *arguments)
            storage_bytes = sources + [_bytes(allocation) for allocation in program.allocations]
            for launch in program.launches:
                # On AMD a kernel also depends on whether offsets into each tensor fit 32 bits.
                arrays = _arrays(launch) if target.architecture.startswith("gfx") else []
                wide = [storage_bytes[array.source] >= 2**31 for array in arrays]
                self.planned.setdefault((*direct.compiled_kind(launch), *wide), Planned(launch, storage_bytes))
        return program

    def _as_planned(self, arg: Any) -> Any:
        """Replace tensors by ones at addresses as an allocator gives them. A plan describes them, and reads none."""
        if isinstance(arg, (list, tuple)):
            return [self._as_planned(own) for own in arg]
        if not isinstance(arg, Tensor):
            return arg
        storage = arg.untyped_storage()
        kind = storage._cdata, arg.dtype, arg.shape, arg.stride(), arg.storage_offset()
        if kind not in self._described:
            self._described[kind] = self._at_an_address(arg, storage)
        return self._described[kind]

    def _at_an_address(self, like: Tensor, storage: Any) -> Tensor:
        size = storage.nbytes()
        if not size:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self._free, storage
            self._free += -(-size // _APART) * _APART + _APART
        address, _ = self._storages[storage._cdata]
        memory = torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=torch.uint8)
        return memory.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


def _results(program: Program) -> Any:
    """Tensors without memory in the place of a program's results; empty ones where an operator returns None."""

    def made(number: int | None) -> Tensor:
        if number is None:
            return torch.empty(0)
        allocation = program.allocations[number]
        assert isinstance(allocation, Allocation)
        return torch.empty(allocation.shape, dtype=allocation.dtype)

    if program.results is None:
        return None
    return made(program.results) if type(program.results) is int else tuple(map(made, program.results))


def _bytes(allocation: Any) -> int:
    if isinstance(allocation, Allocation):
        return torch.Size(allocation.shape).numel() * allocation.dtype.itemsize
    return 8 * len(allocation.elements)


def _arrays(launch: Launch) -> list[Array]:
    values = (value.array if type(value) is Descriptor else value for value in launch.arguments.values())
    return [value for value in values if type(value) is Array]
