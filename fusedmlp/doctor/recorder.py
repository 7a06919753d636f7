"""Compiles what launchers launch, for a GPU that need not be there, and launches nothing.

Launchers run on CPU tensors as they would on a GPU's, so that the compiled kernels have the very signatures,
constants and specialisations of real launches. Only Triton's idea of the current GPU is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fusedmlp.doctor.targets import TARGETS, Target
from fusedmlp.kernels.tiles import configs

TableRow = tuple[str, configs.Path, int]


@dataclass(frozen=True)
class Launch:
    """One kernel that was asked for."""

    kernel: str  # without "_" and "_kernel" around it
    row: TableRow | None  # of the tile table that its launcher took; None if none
    arguments: dict[str, Any]  # by name, with Triton's options
    compiled: Any = None  # Triton's CompiledKernel, or the exception that compiling raised
    log: str = ""  # of ptxas; empty if Triton had the kernel in its cache

    @property
    def path(self) -> configs.Path:
        """How it was meant to move tiles."""
        return self.row[1] if self.row else "pointer"

    @property
    def tile(self) -> str:
        """Tile sizes and options, as text."""
        tile: configs.Tile | None = self.arguments.get("TILE")
        values = self.arguments | ({"SUBTILES": tile.SUBTILES} if tile else {})
        named = {"s": "SUBTILES", "w": "num_warps", "p": "num_stages"}
        blocks = tile[:3] if tile else [value for name, value in self.arguments.items() if name.startswith("BLOCK")]
        return "x".join(map(str, blocks)) + "".join(
            f" {letter}{values[k]}" for letter, k in named.items() if k in values
        )


class _AbsentGPU:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target.triton

    def get_current_device(self) -> int:
        return list(TARGETS).index(self._target.name)  # Triton keeps what it compiled by this number

    def get_current_stream(self, _: int) -> int:
        return 0


def _without_binary(*compiling: Any) -> tuple[str, str] | None:
    """Triton's hook: called without arguments for a key in its caches, then with the stages of a compilation."""
    if not compiling:
        return "without binary", "without binary"
    _, stages, *_ = compiling
    if "cubin" in stages:
        stages["cubin"] = lambda *_: b""
    return None


class _Table(dict[Any, Any]):
    """A tile table that notes what was last taken from it."""

    last: TableRow | None = None

    def __getitem__(self, key: Any) -> Any:
        self.last = key
        return super().__getitem__(key)


@contextmanager
def recording(
    target: Target,
    shape: configs.ShapeClass,
    *,
    with_tma: bool = True,
    specialised: bool = False,
    binaries: bool = True,
    wanted: Callable[[Launch], bool] = lambda _: True,
) -> Iterator[list[Launch]]:
    """Launches inside are compiled for `target` with the tiles of `shape`, whatever the sizes of the tensors.

    Without `with_tma` launchers find no configuration that uses descriptors, as if the weights lay in no one buffer.
    `specialised`: kernels with a task for each warp are used where the table has them.
    Without `binaries` NVIDIA's kernels are compiled to PTX and no further: ptxas takes longer than all before it. There
    is no line information then, which changes what ptxas makes, but not the PTX.
    Launches that are not `wanted` are left out.
    """
    launches: list[Launch] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        name = kernel.fn.__name__.removeprefix("_").removesuffix("_kernel")
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        # A launcher that wanted descriptors but cannot have them has chosen again.
        launch = Launch(name, table.last if name.startswith("grouped_") else None, arguments)
        if not wanted(launch):
            return
        with redirect_stdout(StringIO()) as log:
            try:
                compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            except Exception as error:  # whatever the compiler says is a finding, and other kernels are still to come
                compiled = error
        launches.append(replace(launch, compiled=compiled, log=log.getvalue()))

    table = _Table(
        (key, {"short": tiles[shape], "long": tiles[shape]})
        for key, tiles in configs.TABLES[target.name].items()
        if (with_tma or key[1] not in configs.BY_DESCRIPTORS) and shape in tiles
    )
    run: Any = JITFunction.run
    active = driver._active
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(configs, "architecture", return_value=target.name))
        stack.enter_context(mock.patch.dict(configs.TABLES, {target.name: table}))
        stack.enter_context(mock.patch.object(configs, "SPECIALISED", specialised))
        # How many programs a launch has changes nothing in a kernel.
        properties = SimpleNamespace(multi_processor_count=100)
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
        for scope in (knobs.compilation, knobs.nvidia, knobs.runtime):
            stack.enter_context(scope.scope())
        knobs.nvidia.dump_ptxas_log = True
        if not binaries:
            knobs.compilation.disable_line_info = True
            knobs.runtime.add_stages_inspection_hook = _without_binary
        stack.callback(driver.set_active, active)
        driver.set_active(_AbsentGPU(target))
        yield launches
