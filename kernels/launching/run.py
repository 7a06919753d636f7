"""Operators: programs, planned once for each kind of call and run on every call.

A call whose kind has been planned decides nothing: it allocates the tensors of its program, fills in addresses and
launches. A program is planned from its key alone, so a plan sees nothing that the key lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..operands.arrays import Array
from ..operands.descriptors import Descriptor
from ..operands.expert_tensors import device_table
from ..tiles import select
from ..tiles.select import Target
from . import direct
from .arguments import Arguments, described, seen
from .direct import INTERPRETED
from .program import Allocation, Builder, Launch, Lifetimes, Program

_MOST = 256  # kinds of calls of one operator that are kept
_recordings: list[list[Launch]] = []


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches of all programs that run inside, in any thread."""
    launches: list[Launch] = []
    _recordings.append(launches)
    try:
        yield launches
    finally:
        _recordings[:] = [other for other in _recordings if other is not launches]


class _Bound:
    """A program on one device, with `steps` as soon as all of its kernels have been compiled."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lifetimes = program.lifetimes()
        self.kernels = tuple({id(launch.kernel): launch.kernel for launch in program.launches}.values())
        self.steps: list[direct.Step] | None = None


class Operator:
    """A function of tensors that runs the program which `plan` makes of the kinds of its arguments.

    `plan(builder, *arguments)` sees an `Array` for every tensor, for a list of several tensors (experts)
    `ExpertTensors` of arrays, for other lists and for tuples (segments) a list of arrays, and constants as they are.
    """

    def __init__(self, plan: Callable[..., Any], warp_specialized: bool | None, multiplied: int = 0) -> None:
        """`warp_specialized`: as in `Target`. `multiplied`: index of an argument with the dtype of the operands; any
        tensor if nothing is multiplied.
        """
        update_wrapper(self, plan)
        self._plan = plan
        self._warp_specialized = warp_specialized
        self._multiplied = multiplied
        self._bound: dict[Any, _Bound] = {}

    def program(self, target: Target, *args: Any) -> Program:
        """Program of a call on that target; nothing is allocated or launched."""
        return self._program(target, Arguments.of(args), args)

    def _program(self, target: Target, arguments: Arguments, args: Sequence[Any]) -> Program:
        builder = Builder(target, len(arguments.tensors))
        return builder.program(self._plan(builder, *seen(arguments.kinds, args)))

    def __call__(self, *args: Any) -> Any:
        """Run on the current stream of the arguments' device."""
        multiplied = args[self._multiplied]
        if type(multiplied) in (tuple, list):
            (multiplied, *_) = multiplied
        device = multiplied.device
        if device.type != "cpu" and device.index != torch.get_device_module(device).current_device():
            with torch.get_device_module(device).device(device):  # Triton launches on the current one
                return self(*args)
        arguments = Arguments.of(args)
        # First, as its errors say more than the driver's.
        target = select.target(device, self._warp_specialized, multiplied.dtype)
        active = None if INTERPRETED else driver.active
        key = (arguments.kinds, target, active, device)
        bound = self._bound.get(key)
        if bound is None:
            bound = _Bound(self._program(target, arguments, args))
            if len(self._bound) >= _MOST:
                for oldest in [*self._bound][:1]:  # copied, as other threads change it
                    self._bound.pop(oldest, None)
            self._bound[key] = bound
        return _run(bound, arguments, device, active)


class Launcher:
    """A function of tensors that plans and runs on every call, and remembers nothing.

    Other plans, whose programs have several launches, call `launcher.plan(builder, ...)`.
    """

    def __init__(self, plan: Callable[..., Any]) -> None:
        update_wrapper(self, plan)
        self.plan = plan

    def __call__(self, *args: Any, warp_specialized: bool | None = None, **named: Any) -> Any:
        """Run on the current stream of the tensors' device; `warp_specialized`: as in `Target`."""
        tensors: list[Tensor] = []
        args = tuple(described(arg, tensors) for arg in args)
        named = {name: described(arg, tensors) for name, arg in named.items()}
        device = tensors[0].device
        builder = Builder(select.target(device, warp_specialized, torch.float32), len(tensors))
        program = builder.program(self.plan(builder, *args, **named))
        arguments = Arguments((), tensors, [*map(Tensor.data_ptr, tensors)])
        return _run(_Bound(program), arguments, device, None if INTERPRETED else driver.active)


def _run(bound: _Bound, arguments: Arguments, device: torch.device, active: Any) -> Any:
    program = bound.program
    for recording in _recordings:
        recording += program.launches
    later: list[Any] = [None] * len(program.allocations)
    sources, addresses = arguments.tensors + later, arguments.addresses + later
    memory = _memory(bound.lifetimes, sources, addresses, device)
    if active is None or not direct.is_possible(active, bound.kernels):
        for launch, _ in zip(program.launches, memory, strict=False):
            _by_triton(launch, sources)
    elif bound.steps is None:
        _bind(bound, sources, active, addresses, memory)
    else:
        direct.launch_steps(bound.steps, active, addresses, memory)
    for _ in memory:  # after the last launch
        pass
    results, made = program.results, sources[program.num_arguments :]
    if results is None:
        return None
    if type(results) is int:
        return made[results]
    return results._make([None if number is None else made[number] for number in results])


def _memory(
    lifetimes: Sequence[Lifetimes], sources: list[Any], addresses: list[Any], device: torch.device
) -> Iterator[None]:
    """Free and allocate what a program does, one step of `lifetimes` at a time."""
    for freed, made in lifetimes:
        for source in freed:
            sources[source] = None
        for source, allocation in made:
            if isinstance(allocation, Allocation):
                shape, strides, dtype, _, copied = allocation
                tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)  # faster than `empty`
                if copied is not None:
                    tensor.copy_(_tensor(copied, sources))
            else:
                elements = (addresses[e.source] + e.offset if isinstance(e, Array) else e for e in allocation.elements)
                tensor = device_table(tuple(elements), device)
            address = tensor.data_ptr()
            if address & 15:
                raise RuntimeError(f"allocator: expected new tensors at multiples of 16 bytes; got {address:#x}")
            sources[source], addresses[source] = tensor, address
            del tensor  # a generator keeps its variables
        yield


def _bind(bound: _Bound, sources: Sequence[Any], active: Any, addresses: Sequence[int], memory: Iterator[None]) -> None:
    """Launch, and keep the steps of later launches if all of them can be direct."""
    steps: list[direct.Step] = []
    for launch, step in zip(bound.program.launches, memory, strict=False):
        kind = direct.compiled_kind(launch)
        compiled = direct.known(kind)
        if compiled is not None:
            steps.append(direct.step_of(launch, compiled))
            direct.launch_steps(steps[-1:], active, addresses, [step])
        elif compiled := direct.keep(kind, _by_triton(launch, sources)):
            steps.append(direct.step_of(launch, compiled))
    if len(steps) == len(bound.program.launches):
        bound.steps = steps


def _by_triton(launch: Launch, sources: Sequence[Tensor]) -> Any:
    """Triton's own launch, which compiles if it must."""
    by_gluon = isinstance(launch.kernel, JITFunction) and launch.kernel.is_gluon()
    direct.settle_key(launch)
    arguments = {name: _value(value, sources, by_gluon) for name, value in launch.arguments.items()}
    return launch.kernel[launch.grid](**arguments, **launch.options)


def _value(value: Any, sources: Sequence[Tensor], by_gluon: bool) -> Any:
    if type(value) is Descriptor:
        return value.described(_tensor(value.array, sources), by_gluon)
    return _tensor(value, sources) if type(value) is Array else value


def _tensor(array: Array, sources: Sequence[Tensor]) -> Tensor:
    """The tensor, or the part of it, that an array describes."""
    source = sources[array.source]
    if array.offset == 0 and array.shape == source.shape and array.strides == source.stride():
        return source
    start = source.storage_offset() + array.offset // source.element_size()
    return source.detach().as_strided(array.shape, array.strides, start)
