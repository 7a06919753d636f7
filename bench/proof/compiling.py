"""Compiles launches as `fusedmlp/compile_ahead` does, and keeps what ptxas says, or stops before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from triton import knobs

from fusedmlp.compile_ahead import compiling
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.targets import Target


@dataclass(frozen=True)
class Compiled:
    """A launch and what Triton made of it."""

    launch: Launch
    kernel: Any  # Triton's CompiledKernel, or the exception that compiling raised
    log: str = ""  # of ptxas; empty if Triton had the kernel in its cache


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
    with ExitStack() as stack:
        for scope in (knobs.compilation, knobs.nvidia, knobs.runtime):
            stack.enter_context(scope.scope())
        knobs.nvidia.dump_ptxas_log = True
        if not binaries:
            knobs.compilation.disable_line_info = True
            knobs.runtime.add_stages_inspection_hook = _without_binary
        stack.enter_context(compiling.compiling_for(target))
        yield


def compiled(launch: Launch) -> Compiled:
    """Compile the launch's kernel; call it in the context `compiling_for`."""
    with redirect_stdout(StringIO()) as log:
        try:
            made = compiling.compiled(launch)
        except Exception as error:  # whatever the compiler says is a finding, and other kernels are still to come
            made = error
    return Compiled(launch, made, log.getvalue())
