"""Reports of NVIDIA's tools, which come with Triton, on a compiled kernel."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import accumulate, pairwise
from typing import Any

import triton
from triton.compiler.compiler import make_backend

_ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
_WARNING = re.compile(r"\((C75\d\d)\)")


def resource_usage(cubin: bytes) -> str:
    """Registers and memory, as cuobjdump prints them."""
    return _inspect(triton.knobs.nvidia.cuobjdump.path, ["-res-usage"], cubin)


def disassemblies(cubins: Sequence[bytes], capability: int) -> list[str]:
    """The SASS of each, as nvdisasm prints it: all in one run, because its start takes longer than a kernel."""
    codes = [code(cubin) for cubin in cubins]
    # -ndf: without data-flow analysis, which would not be printed.
    options = ["-ndf", "--binary", f"SM{capability}"]
    listing = _inspect(triton.knobs.nvidia.nvdisasm.path, options, b"".join(codes)) if codes else ""
    lines = [(int(found[1], 16), line) for line in listing.splitlines() if (found := _ADDRESS.match(line))]
    ends = list(accumulate(map(len, codes)))
    bounds = [0, *(bisect_left(lines, (end, "")) for end in ends)]
    return ["\n".join(line for _, line in lines[start:end]) for start, end in pairwise(bounds)]


def code(cubin: bytes) -> bytes:
    """The one kernel in a 64-bit ELF file: its section `.text.<name>` (System V ABI, Object Files)."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + i * size) for i in range(number)]
    found = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin.startswith(b".text.", headers[names][4] + name)
    ]
    if len(found) != 1:
        raise RuntimeError(f"cubin: expected one section .text.<name>; got {len(found)}")
    return found[0]


def _inspect(tool: str, options: Sequence[str], binary: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True)
    return done.stdout


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
