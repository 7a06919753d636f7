"""A Triton driver whose launches execute the compiled PTX on CPU tensors, in several orders.

    with driver.gpu("sm_90") as launches:
        kernel[grid](tensor, ...)

ptxas is not run: modules are loaded from PTX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from ptx_emulator import arguments, build
from ptx_emulator.library import Box, EmulationError, Order, Outcome, Program, run, tensor_map
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime import driver

# Bytes of shared memory that a block may have, by GPU.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
MULTIPROCESSORS = 3  # few, so that persistent programs get several tiles
ORDERS = (
    Order("early"),
    Order("late", races=True, global_races=True),
    Order("random", seed=1, random_schedule=True, resident=3),
)
# Notes of the emulator that tell of a mistake, whatever the results.
_SUSPICIOUS = re.compile("RACE|PROXY|FENCE|UNWRITTEN|mbarrier|nothing waited|on their way")
_NARROW = re.compile(r"(?:st|atom|red)\.shared\S*\.b(8|16)\b")

Mutation = Callable[[str, str], str]


@dataclass(frozen=True)
class Launched:
    """One launch that was executed."""

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    shared: int  # bytes a block
    ptx: str = field(repr=False)
    outcome: Outcome = field(repr=False)

    @property
    def counters(self) -> dict[str, int]:
        """Counters of the first order."""
        return self.outcome.counters


@dataclass
class _Session:
    """Settings of the launches inside `gpu`, and the launches that were executed."""

    orders: Sequence[Order] = ORDERS
    mutation: Mutation | None = None
    strict: bool = True
    launched: list[Launched] = field(default_factory=list)


_session = _Session()


class _Launcher:
    """The launcher that Triton calls for a compiled kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._metadata = metadata
        self._signature = list(src.signature.values())
        self._descriptors = getattr(metadata, "tensordesc_meta", None)

    def __call__(self, x: int, y: int, z: int, _stream: int, program: Program, *rest: Any) -> None:
        _packed_metadata, _launch_metadata, _enter_hook, _exit_hook, *args = rest
        pairs = list(arguments.flat(*self._expanded(args)))
        memory = self._metadata
        scratch = [_scratch(x * y * z * size) for size in (memory.global_scratch_size, memory.profile_scratch_size)]
        pairs += [("*i8", None if t is None else -(-t.data_ptr() // 128) * 128) for t in scratch]
        if _session.mutation is not None:
            program = Program.of(_session.mutation(memory.name, program.ptx))
        if len(pairs) != len(program.params):
            raise EmulationError(f"{memory.name}: {len(pairs)} arguments for {len(program.params)} parameters")
        params = bytearray(program.param_bytes)
        for (kind, value), (size, place) in zip(pairs, program.params, strict=True):
            data = arguments.packed(kind, value, size)
            if len(data) != size:
                raise EmulationError(f"{memory.name}: {len(data)} bytes of {kind} for a parameter of {size}")
            params[place : place + size] = data
        execute(program, (x, y, z), 32 * memory.num_warps, memory.shared, bytes(params), memory.name)

    def _expanded(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Types and values of arguments; a descriptor becomes the map, sizes and strides that the kernel takes."""
        kinds: list[Any] = []
        values: list[Any] = []
        described = iter(self._descriptors or ())
        others = nvidia_driver.make_tensordesc_arg.__code__.co_argcount - 2  # newer versions have more arguments
        for kind, arg in zip(self._signature, args, strict=True):
            if not (isinstance(kind, str) and kind.startswith("tensordesc")):
                kinds.append(kind)
                values.append(arg)
                continue
            expanded = nvidia_driver.make_tensordesc_arg(arg, next(described, None), *[None] * others)
            rank = len(arg.shape)
            sizes = ["i32"] * rank + ["i64"] * rank
            # Without a map: base, shape and strides, flags of padding, then shape and strides again.
            flags = ["i1"] * (len(expanded) - 1 - 4 * rank)
            kinds += (
                ["nvTmaDesc", *sizes] if len(expanded) == 1 + 2 * rank else ["*i8", *["i64"] * 2 * rank, *flags, *sizes]
            )
            values += expanded
        return kinds, values


def _scratch(size: int) -> torch.Tensor | None:
    return torch.zeros(size + 128, dtype=torch.uint8) if size else None


def execute(program: Program, grid: tuple[int, int, int], threads: int, shared: int, params: bytes, name: str) -> None:
    """Run one launch in every order of the session; EmulationError if it makes a mistake in any."""
    if 0 in grid:
        return
    if program.threads and program.threads != threads:
        raise EmulationError(f"{name}: {threads} threads, .reqntid {program.threads}")
    # The search for races has granules as wide as the narrowest store; narrower reads do no harm.
    narrow = _NARROW.findall(program.ptx)
    granule = 1 if "8" in narrow else 2 if narrow else 4
    orders = [Order(**{**vars(order), "races": granule if order.races else 0}) for order in _session.orders]
    outcome = run(program, grid, threads, shared, params, arguments.reachable(), orders)
    _session.launched.append(Launched(name, grid, threads // 32, shared, program.ptx, outcome))
    noticed = [note for note in outcome.notes if _SUSPICIOUS.search(note)]
    if noticed and _session.strict:
        raise EmulationError("\n".join(noticed))


class _Utils:
    """The functions of the CUDA driver that the launcher and Triton call."""

    def __init__(self, shared: int) -> None:
        self._shared = shared

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._shared,
            "multiprocessor_count": MULTIPROCESSORS,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(
        self, _name: str, kernel: bytes, _shared: int, _device: int
    ) -> tuple[Program, Program, int, int, int]:
        program = Program.of(kernel.decode())
        return program, program, 0, 0, 1024

    def fill_tma_descriptor_tiled(
        self,
        address: int,
        swizzle: int,
        element_bytes: int,
        element_type: int,
        block: Sequence[int],
        shape: Sequence[int],
        strides: Sequence[int],
        fill: int,
    ) -> bytes:
        inner_first = [element_bytes * stride for stride in strides[:-1]][::-1]
        return tensor_map(
            Box(address, shape[::-1], inner_first, block[::-1], swizzle, element_type, element_bytes, fill)
        )

    fill_tma_descriptor = fill_tma_descriptor_tiled  # its name before Triton 3.7


class _Driver:
    """The part of a Triton driver that compiling and launching use."""

    launcher_cls = _Launcher

    def __init__(self, target: str) -> None:
        self._capability = int(target.removeprefix("sm_"))
        self.utils = _Utils(SHARED[target])

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 100 + self._capability  # Triton keeps compiled kernels by device: one for each target

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def gpu(
    target: str, *, orders: Sequence[Order] = ORDERS, mutation: Mutation | None = None, strict: bool = True
) -> Iterator[list[Launched]]:
    """Compile launches in this context for `target`, and execute them here; yields the list of executed launches.

    `mutation(name, ptx)` returns the PTX to execute instead. `strict`: races and the like are errors; else they are in
    the notes of the launch.
    """
    global _session
    build.library()
    before, _session = _session, _Session(orders, mutation, strict)
    active = driver._active
    capability = divmod(int(target.removeprefix("sm_")), 10)
    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS,
        major=capability[0],
        minor=capability[1],
        total_memory=80 * 2**30,
        name=target,
    )
    with ExitStack() as stack:
        # Kernels here have no cubin: they must not be kept with others.
        stack.enter_context(mock.patch.object(triton.knobs.cache, "dir", str(build.CACHE / "triton")))
        stack.enter_context(mock.patch.object(nvidia_compiler.CUDABackend, "make_cubin", _keep_ptx))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=capability))
        driver.set_active(_Driver(target))
        try:
            yield _session.launched
        finally:
            driver.set_active(active)
            _session = before


def _keep_ptx(_backend: Any, src: str, _metadata: Any, _options: Any, _capability: int) -> bytes:
    return src.encode()
