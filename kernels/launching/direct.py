"""Launching a kernel that has been compiled, without most of what Triton does for every launch.

`kernel[grid](...)` binds and specializes the arguments, looks up the kernel by a text of those, asks for hooks and
encodes descriptors anew, which takes several times as long as the driver. This file has the private code of Triton
that launches need (`gluon_compat.py` has Gluon's): which compiled kernel belongs to a launch, how its values are passed
to the driver, and when Triton's own launch is needed: for the first launch of a kind, while there are hooks, debugging
or a patched `JITFunction.run`, under the interpreter, and on AMD.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITCallable, JITFunction

from ..operands.arrays import Array
from ..operands.descriptors import Descriptor
from .program import Launch

_MOST = 4096  # upper bound on compiled kernels, and on tensor maps of one descriptor, that are kept
_run = JITFunction.run
_refused: Any = None  # a driver whose launch signature is not supported
INTERPRETED = knobs.runtime.interpret  # read once: kernels stay as they were decorated
_compiled: dict[tuple[Any, ...], Direct] = {}


class Direct(NamedTuple):
    """A compiled kernel on its device."""

    passed: tuple[Any, ...]  # to the driver's launch, between the stream and the kernel's values
    encodings: tuple[Any, ...]  # Triton's metadata of each descriptor's tensor map
    tensor_maps: dict[Any, TensorMaps]  # by the number of the descriptor, its shape and strides


class TensorMaps(dict[int, Any]):
    """Encoded tensor maps of one descriptor of a launch, by address; made when first asked for."""

    def __init__(self, descriptor: Descriptor, encoding: Any) -> None:
        super().__init__()
        self._descriptor, self._encoding = descriptor, encoding

    def __missing__(self, address: int) -> Any:
        _make_room(self)
        encoded = self[address] = encode(self._descriptor, self._encoding, address)
        return encoded


class _Memory(NamedTuple):
    """The attributes that Triton's encoding reads of a descriptor and of its base, in one object."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> _Memory:
        return self

    def data_ptr(self) -> int:
        return self.address


def encode(descriptor: Descriptor, encoding: Any, address: int) -> Any:
    """The tensor map of the memory at `address`, by Triton's own function."""
    from triton.backends.nvidia import driver as nvidia

    others = nvidia.make_tensordesc_arg.__code__.co_argcount - 2  # parameters of newer versions, unused for NVIDIA
    described: Any = _Memory(address, descriptor.shape, descriptor.strides)
    return nvidia.make_tensordesc_arg(described, encoding, *[None] * others)[0]


class Step(NamedTuple):
    """A launch with its compiled kernel; only addresses are missing."""

    grid: tuple[int, ...]
    passed: tuple[Any, ...]
    values: list[Any]  # arguments of the kernel, None where an address or a tensor map goes
    addresses: list[tuple[int, int, int]]  # index in `values`, number of the source, bytes past its start
    maps: list[tuple[int, int, int, TensorMaps]]


def launch_steps(steps: Sequence[Step], active: Any, addresses: Sequence[int], memory: Iterable[None]) -> None:
    """Launch on the current stream; `addresses` are those of the program's sources, which `memory` puts there."""
    launch, stream = active.utils.launch, active.get_current_stream(active.get_current_device())
    for (grid, passed, template, places, maps), _ in zip(steps, memory, strict=False):
        values = template.copy()
        for place, source, offset in places:
            values[place] = addresses[source] + offset
        for place, source, offset, tensor_maps in maps:
            values[place] = tensor_maps[addresses[source] + offset]
        launch(*grid, stream, *passed, values)


def step_of(launch: Launch, direct: Direct) -> Step:
    """The step of a launch whose kernel has been compiled."""
    values: list[Any] = []
    addresses, maps = [], []
    number, arguments = 0, launch.arguments
    for name, _ in _signature(launch.kernel).parameters:
        value = arguments[name]
        if type(value) is Array:
            addresses.append((len(values), value.source, value.offset))
            values.append(None)
        elif type(value) is Descriptor:
            key = number, value.shape, value.strides
            tensor_maps = direct.tensor_maps.get(key)
            if tensor_maps is None:
                _make_room(direct.tensor_maps)
                tensor_maps = direct.tensor_maps[key] = TensorMaps(value, direct.encodings[number])
            maps.append((len(values), value.array.source, value.array.offset, tensor_maps))
            values += (None, *value.shape, *value.strides)
            number += 1
        else:
            values.append(value)
    return Step((*launch.grid, 1, 1)[:3], direct.passed, values, addresses, maps)


class _Signature(NamedTuple):
    """Names of a kernel's parameters, in its order."""

    kernel: Any  # referenced, so that no other kernel gets its id
    parameters: tuple[tuple[str, bool], ...]  # without constants; whether Triton specializes numbers of that name
    constants: tuple[str, ...]


_signatures: dict[int, _Signature] = {}  # by id: a kernel's own hash is computed from its source


def _signature(kernel: Any) -> _Signature:
    signature = _signatures.get(id(kernel))
    if signature is None:
        parameters = tuple((p.name, not p.do_not_specialize) for p in kernel.params if not p.is_constexpr)
        constants = tuple(p.name for p in kernel.params if p.is_constexpr)
        signature = _signatures[id(kernel)] = _Signature(kernel, parameters, constants)
    return signature


def compiled_kind(launch: Launch) -> tuple[Any, ...]:
    """Key of a compiled kernel: Triton compiles one kernel for all launches of a kind on a device."""
    arguments, active = launch.arguments, driver.active
    kernel, parameters, constants = _signature(launch.kernel)
    kind: list[Any] = [id(kernel), active, active.get_current_device(), *launch.options.values()]
    kind += map(arguments.get, constants)  # whose types never change
    for name, specialized in parameters:
        value = arguments[name]
        if type(value) is Array:
            kind += (value.dtype, value.address == 0)
        elif type(value) is int:  # whether it is 1, or a multiple of 16, and how wide it is
            width = 0 if -(2**31) <= value < 2**31 else value.bit_length()
            kind += (value == 1, value % 16 == 0, width) if specialized else (width,)
        else:
            kind.append(value.kind if type(value) is Descriptor else value)
    return tuple(kind)


def settle_key(launch: Launch) -> None:
    """Compute the part of the kernel's key in Triton's cache that its functions give, those that it calls first.

    Triton 3.7 computes a function's key with the global constants of functions that it calls if their keys have been
    computed before, and without them otherwise. The key would depend on what this process has launched before, and
    another process would compile the kernel again.
    """
    if isinstance(launch.kernel, JITCallable):  # interpreted kernels have no key
        _settle_key(launch.kernel, set())


def _settle_key(function: Any, seen: set[int]) -> None:
    if function.hash is not None or id(function) in seen:
        return
    seen.add(id(function))  # a function may call itself
    for callee in _callees(function):
        _settle_key(callee, seen)
    function.cache_key  # noqa: B018  # a property, which keeps what it computes


def _callees(function: Any) -> Iterator[Any]:
    """The functions that a function may call: global ones, those of modules, and methods of Triton's aggregates."""
    names, seen = function.fn.__code__.co_names, set()
    values = [function.__globals__.get(name) for name in names]
    for value in values:  # which grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, JITCallable):
            yield value
        elif isinstance(value, ModuleType):
            values += [getattr(value, name, None) for name in names]
        else:
            values += getattr(value, "hash_attrs", None) or ()


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) >= _MOST:
        kept.clear()


def known(kind: tuple[Any, ...]) -> Direct | None:
    """The kernel that has been compiled for a kind."""
    return _compiled.get(kind)


def keep(kind: tuple[Any, ...], compiled: Any) -> Direct | None:
    """Remember what Triton compiled for a kind; None if it cannot be launched directly."""
    direct = _direct(compiled)
    if direct is not None:
        _make_room(_compiled)
        _compiled[kind] = direct
    return direct


def is_possible(active: Any, kernels: Sequence[Any]) -> bool:
    """Whether launches of these kernels can go past Triton now; the first launch also looks at Triton's launcher."""
    for kernel in kernels:
        if kernel.pre_run_hooks:
            return False
    return active is not _refused and no_hook_is_set()


def no_hook_is_set() -> bool:
    """Whether no hook, debugger or interpreter needs Triton's own launches; kernels can have hooks of their own."""
    runtime = knobs.runtime
    return (
        not INTERPRETED
        and JITFunction.run is _run
        and not runtime.debug
        and not knobs.compilation.instrumentation_mode
        and runtime.add_stages_inspection_hook is None
        and not _hooked(runtime.launch_enter_hook)
        and not _hooked(runtime.launch_exit_hook)
    )


def _hooked(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def _direct(compiled: Any) -> Direct | None:
    """None unless Triton's launcher is the one that this file knows: NVIDIA's since 3.7, without scratch memory."""
    if type(compiled) is not CompiledKernel:
        return None
    launcher = compiled.run
    utils = getattr(driver.active, "utils", None)
    named = ("arg_annotations", "kernel_signature", "launch_cooperative_grid", "launch_pdl")
    if (
        type(launcher).__module__ != "triton.backends.nvidia.driver"
        or not hasattr(utils, "launch")
        or not all(hasattr(launcher, name) for name in named)
    ):
        global _refused
        _refused = driver.active
        return None
    if getattr(launcher, "gsan_enabled", False) or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    encodings = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if None in encodings:
        return None
    # fmt: off
    passed = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, compiled.packed_metadata,
        None, None, None, None, None,  # neither hooks with their argument nor scratch memory
        launcher.arg_annotations, launcher.kernel_signature,
    )
    # fmt: on
    return Direct(passed, encodings, {})
