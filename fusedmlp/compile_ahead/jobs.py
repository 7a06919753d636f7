"""Compiles planned launches in several processes, into Triton's cache."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs

from fusedmlp.command_line import lines
from fusedmlp.compile_ahead.compiling import compiled, compiling_for
from fusedmlp.compile_ahead.planning import Planned
from fusedmlp.targets import Target


class Kernel(NamedTuple):
    """A compiled kernel: a folder of Triton's cache."""

    name: str
    path: str  # how it moves tiles
    sizes: str
    hash: str  # its key in the cache
    binary_bytes: int  # of the cubin (NVIDIA) or hsaco (AMD)
    file_bytes: int  # of all its files
    seconds: float
    was_cached: bool


class CompilerError(RuntimeError):
    """A kernel does not compile; the text is the compiler's."""


class _Work(NamedTuple):
    planned: Sequence[Planned]
    target: Target


_work: _Work | None = None  # of this process and of those that it forks: launches refer to kernels, which do not pickle


def compile_all(planned: Sequence[Planned], target: Target, jobs: int) -> list[Kernel]:
    """Compile the launches in `jobs` processes, with lines of progress on stderr.

    Raises:
        CompilerError: a kernel does not compile.
    """
    global _work
    _work = _Work(planned, target)
    start, made = time.perf_counter(), list[Kernel]()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _begin) as pool:
        try:
            results = pool.map(_compile, range(len(planned)))  # forks, which no thread of `lines` may precede
            with lines(
                lambda: f"compiling: {len(made)} of {len(planned)} kernels, {time.perf_counter() - start:.0f} s"
            ):
                for result in results:
                    if isinstance(result, str):
                        raise CompilerError(result)
                    made.append(result)
        except BrokenProcessPool:
            raise CompilerError("the compiler ended its process, as it does when an assertion of it fails") from None
        except BaseException:  # an interrupt: wait for no kernel
            for child in multiprocessing.active_children():
                child.kill()
            raise
    return list({kernel.hash: kernel for kernel in reversed(made)}.values())[::-1]


def _begin() -> None:
    """Leave an interrupt to the process that forked this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _compile(number: int) -> Kernel | str:
    """Compile one launch; what the compiler raises is returned as text, as it may not pickle."""
    assert _work is not None
    launch, storage_bytes = _work.planned[number]
    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    start = time.perf_counter()
    try:
        with compiling_for(_work.target), knobs.compilation.scope():
            knobs.compilation.listener = listen
            kernel = compiled(launch, storage_bytes)
    except Exception as error:
        return " ".join(f"{launch.name} {launch.path} {launch.sizes}: {type(error).__name__}: {error}".split())[:300]
    seconds = time.perf_counter() - start
    file_bytes = sum(Path(path).stat().st_size for path in kernel.metadata_group.values())
    where = launch.name, launch.path, launch.sizes, kernel.hash
    return Kernel(*where, len(kernel.kernel), file_bytes, seconds, was_cached=all(hits))
