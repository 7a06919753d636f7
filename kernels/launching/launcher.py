"""Launching a kernel that has been compiled, without most of what Triton does for every launch.

`kernel[grid](...)` binds and specialises the arguments, looks up the kernel by a text of that, asks for hooks and
encodes descriptors anew: several times what the driver takes. `launch` looks the kernel up by what specialisation looks
at, and keeps descriptors by the numbers that they are encoded from. The first launch of a kind is Triton's own, as are
all while somebody may watch (hooks, debugging, a patched `JITFunction.run`), under the interpreter and on AMD.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..operands.descriptors import Descriptor

_MOST = 4096  # kernels, and descriptors of one, that are kept
_run = JITFunction.run
_refused: Any = None  # the driver whose launcher is another than this file knows
_INTERPRETED = knobs.runtime.interpret  # when kernels were decorated, which then stay so


class _Parameters(NamedTuple):
    """What of a kernel's signature every launch needs: pointers and descriptors, then numbers, then constants."""

    kernel: Any  # kept, so that its id stays its own
    first_number: int
    first_constant: int
    specialized: tuple[bool, ...]  # of the numbers


class Direct(NamedTuple):
    """A compiled kernel on its device."""

    launcher: Any  # Triton's, which knows the signature
    function: int
    metadata: Any
    tensor_maps: tuple[Any, ...]  # how each descriptor is to be encoded
    encoded: dict[Any, list[Any]]

    def launch(self, grid: Sequence[int], stream: int, values: list[Any]) -> None:
        """Triton's own launch, without hooks."""
        own = self.launcher
        # fmt: off
        driver.active.utils.launch(
            *grid, stream, self.function, own.launch_cooperative_grid, own.launch_pdl, self.metadata, None, None, None,
            None, None, own.arg_annotations, own.kernel_signature, values,
        )
        # fmt: on

    def values(self, pointers: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        """What the kernel takes for addresses and descriptors, then numbers."""
        values, index = [], 0
        for value in pointers:
            if type(value) is Descriptor:
                key = index, value.address, value.shape, value.strides
                values += self.encoded.get(key) or self._encode(key, value)
                index += 1
            else:
                values.append(value)
        values += numbers
        return values

    def _encode(self, key: tuple[Any, ...], value: Descriptor) -> list[Any]:
        if len(self.encoded) >= _MOST:
            self.encoded.clear()
        found = self.encoded[key] = encode(value, self.tensor_maps[key[0]])
        return found


class _At(NamedTuple):
    """Memory, of which encoding asks no more."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def encode(descriptor: Descriptor, tensor_map: Any) -> list[Any]:
    """The tensor map, sizes and strides that the kernel takes for a descriptor, by Triton's own function."""
    from triton.backends.nvidia import driver as nvidia

    others = nvidia.make_tensordesc_arg.__code__.co_argcount - 2  # of newer versions, which NVIDIA's does not use
    described: Any = descriptor._replace(tensor=_At(descriptor.address), offset=None)  # type: ignore[arg-type]
    arguments: list[Any] = nvidia.make_tensordesc_arg(described, tensor_map, *[None] * others)
    return arguments


class _Thread(threading.local):
    recorder: Any = None  # who records launches: see `launching/replay.py`


this_thread = _Thread()


_parameters: dict[int, _Parameters] = {}  # by the id of a kernel
_compiled: dict[tuple[Any, ...], Direct] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """As `kernel[grid](*args, **options)`.

    Tensors, descriptors and None come first, then numbers, then constants, in `args` or by name; the types of constants
    never change.
    """
    recorder = this_thread.recorder
    if not (may_be_direct() and isinstance(kernel, JITFunction) and not kernel.pre_run_hooks):
        _by_triton(kernel, grid, args, options)
        if recorder is not None:
            recorder.passing = True
        return
    _, first_number, first_constant, specialized = _parameters.get(id(kernel)) or _read(kernel, args)
    active = driver.active
    device = active.get_current_device()
    numbers = args[first_number:first_constant]
    key: list[Any] = [id(kernel), active, device, _classes(numbers, specialized)]
    pointers = []
    for value in args[:first_number]:
        if value is None:
            key.append(None)
        elif type(value) is Descriptor:
            key.append(value.kind)
        else:
            key.append(value.dtype)
            value = value.data_ptr()
            key.append(value & 15 == 0)
        pointers.append(value)
    known = (*key, *args[first_constant:], *options.values())
    whole_grid = (*grid, 1, 1)[:3]
    direct = _compiled.get(known)
    if direct is None:
        direct = _direct(_by_triton(kernel, grid, args, options))
        if direct is not None:
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[known] = direct
    else:
        direct.launch(whole_grid, active.get_current_stream(device), direct.values(pointers, numbers))
    if recorder is not None:
        recorder.add(kernel, direct, whole_grid, args[:first_number], numbers)


@lru_cache(maxsize=_MOST)
def _classes(numbers: tuple[int, ...], specialized: tuple[bool, ...]) -> tuple[Any, ...]:
    """What specialisation sees of numbers: whether they are 1, or multiples of 16, and how wide they are."""
    return tuple(
        (n == 1 and special, n % 16 == 0 and special, 0 if -(2**31) <= n < 2**31 else n.bit_length())
        for n, special in zip(numbers, specialized, strict=True)
    )


def _by_triton(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]) -> Any:
    by_gluon = isinstance(kernel, JITFunction) and kernel.is_gluon()
    checked = (arg.checked(by_gluon) if type(arg) is Descriptor else arg for arg in args)
    return kernel[grid](*checked, **options)


def may_be_direct() -> bool:
    """Whether launches can go past Triton now, for all that is known yet."""
    return nobody_watches() and driver.active is not _refused


def nobody_watches() -> bool:
    """Whether nobody would miss what Triton does for every launch; kernels can have hooks of their own."""
    runtime = knobs.runtime
    return (
        not _INTERPRETED
        and JITFunction.run is _run
        and not runtime.debug
        and not knobs.compilation.instrumentation_mode
        and runtime.add_stages_inspection_hook is None
        and not _hooked(runtime.launch_enter_hook)
        and not _hooked(runtime.launch_exit_hook)
    )


def _hooked(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def _read(kernel: Any, args: Sequence[Any]) -> _Parameters:
    constant = next((p.num for p in kernel.params if p.is_constexpr), len(kernel.params))
    number = constant
    while number and type(args[number - 1]) is int:
        number -= 1
    specialized = tuple(not p.do_not_specialize for p in kernel.params[number:constant])
    found = _parameters[id(kernel)] = _Parameters(kernel, number, constant, specialized)
    return found


def _direct(compiled: Any) -> Direct | None:
    """None if Triton's launcher is not one that this file knows: NVIDIA's of 3.7 and later, without scratch memory."""
    if type(compiled) is not CompiledKernel:
        return None
    launcher = compiled.run
    utils = getattr(driver.active, "utils", None)
    known = ("arg_annotations", "kernel_signature", "launch_cooperative_grid", "launch_pdl")
    if (
        type(launcher).__module__ != "triton.backends.nvidia.driver"
        or not hasattr(utils, "launch")
        or not all(hasattr(launcher, name) for name in known)
    ):
        global _refused
        _refused = driver.active
        return None
    if getattr(launcher, "gsan_enabled", False) or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    tensor_maps = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if None in tensor_maps:
        return None
    return Direct(launcher, compiled.function, compiled.packed_metadata, tensor_maps, {})
