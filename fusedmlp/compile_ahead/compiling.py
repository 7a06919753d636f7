"""Compiles launches of programs for a GPU that need not be there, and launches nothing.

Programs are planned for the GPU from kinds of tensors, so that the compiled kernels have the signatures, constants and
specializations of real launches. Only Triton's idea of the current GPU is replaced: a kernel has the key in Triton's
cache by which a process on that GPU looks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import driver

from fusedmlp.kernels.launching import direct
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.descriptors import Descriptor
from fusedmlp.targets import TARGETS, Target


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
    """Address, dtype and size: the facts of a tensor that specialization uses."""

    address: int  # modulo 16
    dtype: torch.dtype
    storage_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        """On AMD: bytes that offsets reach. Triton asks whether they fit 32 bits."""
        return self.storage_bytes


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Make Triton compile for that target in this context."""
    active = driver._active
    driver.set_active(_AbsentGPU(target))
    try:
        yield
    finally:
        driver.set_active(active)


def compiled(launch: Launch, storage_bytes: Sequence[int] = ()) -> Any:
    """Compile the launch's kernel, or find it in Triton's cache; call it in the context `compiling_for`.

    Args:
        launch: of a program.
        storage_bytes: of the program's sources, for AMD. Without it, those of tensors that fit 32 bits, as most do.

    Returns:
        Triton's `CompiledKernel`.
    """

    def pointer(array: Array) -> _Pointer:
        return _Pointer(array.address, array.dtype, storage_bytes[array.source] if storage_bytes else 0)

    def value(argument: Any) -> Any:
        if type(argument) is Descriptor:
            return argument.described(pointer(argument.array), launch.kernel.is_gluon())
        return pointer(argument) if type(argument) is Array else argument

    direct.settle_key(launch)
    arguments = {name: value(argument) for name, argument in launch.arguments.items()}
    return launch.kernel.run(grid=launch.grid, warmup=True, **arguments, **launch.options)
