"""Compiles launches of programs for a GPU that need not be there, and launches nothing.

Programs are planned for the GPU from kinds of tensors, so that the compiled kernels have the signatures, constants and
specializations of real launches. Only Triton's idea of the current GPU is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from fusedmlp.doctor.targets import TARGETS, Target
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.descriptors import Descriptor


@dataclass(frozen=True)
class Compiled:
    """A launch and what Triton made of it."""

    launch: Launch
    kernel: Any  # Triton's CompiledKernel, or the exception that compiling raised
    log: str = ""  # of ptxas; empty if Triton had the kernel in its cache


class _AbsentGPU:
    """The part of a Triton driver that compiling uses."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target.triton

    def get_current_device(self) -> int:
        return list(TARGETS).index(self._target.name)  # the key by which Triton keeps compiled kernels

    def get_current_stream(self, _: int) -> int:
        return 0


@dataclass(frozen=True)
class _Pointer:
    """Address and dtype: the facts of a tensor that specialization uses."""

    address: int  # modulo 16
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        """On AMD: bytes that offsets reach; 0 stands for any number that fits 32 bits, as that of most tensors."""
        return 0


def _without_binary(*compiling: Any) -> tuple[str, str] | None:
    """Triton's hook: called without arguments for a key in its caches, then with the stages of a compilation."""
    if not compiling:
        return "without binary", "without binary"
    _, stages, *_ = compiling
    if "cubin" in stages:
        stages["cubin"] = lambda *_: b""
    return None


@contextmanager
def compiling_for(target: Target, *, binaries: bool = True) -> Iterator[None]:
    """Make Triton compile for that target in this context.

    Without `binaries` NVIDIA's kernels are compiled to PTX and no further: ptxas takes longer than all before it. There
    is no line information then, which would change the code of ptxas, but not the PTX.
    """
    active = driver._active
    with ExitStack() as stack:
        for scope in (knobs.compilation, knobs.nvidia, knobs.runtime):
            stack.enter_context(scope.scope())
        knobs.nvidia.dump_ptxas_log = True
        if not binaries:
            knobs.compilation.disable_line_info = True
            knobs.runtime.add_stages_inspection_hook = _without_binary
        stack.callback(driver.set_active, active)
        driver.set_active(_AbsentGPU(target))
        yield


def compiled(launch: Launch) -> Compiled:
    """Compile the launch's kernel; call it in the context `compiling_for`."""
    kernel = launch.kernel
    arguments = {name: _value(value, kernel.is_gluon()) for name, value in launch.arguments.items()}
    with redirect_stdout(StringIO()) as log:
        try:
            made = kernel.run(grid=launch.grid, warmup=True, **arguments, **launch.options)
        except Exception as error:  # whatever the compiler says is a finding, and other kernels are still to come
            made = error
    return Compiled(launch, made, log.getvalue())


def _value(value: Any, by_gluon: bool) -> Any:
    if type(value) is Descriptor:
        return value.described(_Pointer(value.array.address, value.array.dtype), by_gluon)
    return _Pointer(value.address, value.dtype) if type(value) is Array else value
