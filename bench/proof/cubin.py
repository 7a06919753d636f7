"""Reports of cuobjdump and ptxas, which come with Triton, on a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import triton
from triton.compiler.compiler import make_backend

_WARNING = re.compile(r"\((C75\d\d)\)")


def resource_usage(cubin: bytes) -> str:
    """Registers and memory, as cuobjdump prints them."""
    return _inspect(["-res-usage"], cubin)


def sass(compiled: Any) -> str:
    """The instructions of a `CompiledKernel`."""
    return _inspect(["-sass"], compiled.asm["cubin"])


def _inspect(options: Sequence[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def warnings(compiled: Any, log: str) -> tuple[str, ...]:
    """Warnings `C75xx` of ptxas: it makes every wgmma wait for the one before.

    `log` is what ptxas said when it made the kernel. It is empty if the kernel was in Triton's cache; then one with
    wgmma is assembled again, by Triton and so by the same ptxas with the same options.
    """
    if not log and "wgmma.mma_async" in compiled.asm.get("ptx", ""):
        backend, meta = make_backend(compiled.metadata.target), compiled.metadata
        with triton.knobs.nvidia.scope(), redirect_stdout(StringIO()) as printed:
            triton.knobs.nvidia.dump_ptxas_log = True
            backend.make_cubin(compiled.asm["ptx"], {}, meta, meta.target.arch)
        log = printed.getvalue()
        if not log:
            raise RuntimeError("ptxas -v: expected its log; got nothing")
    return parse_warnings(log)


def parse_warnings(log: str) -> tuple[str, ...]:
    """Codes of warnings of wgmma, each once."""
    return tuple(sorted(set(_WARNING.findall(log))))
