"""The emulator's C++, compiled on first use into `build/cache/emulator` of the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "machine"
CACHE = Path(__file__).parents[2] / "build/cache/emulator"
# A multiply and an add stay two roundings, and integers wrap, as on the GPU.
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fPIC",
    "-Wall",
)


def compiler() -> str | None:
    """The C++ compiler: `$CXX`, or the first of c++, g++ and clang++ that there is."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def library() -> Path:
    """Compile the shared library, if needed; RuntimeError without a compiler, or with the compiler's message."""
    found = compiler()
    if found is None:
        raise RuntimeError("the PTX emulator needs a C++20 compiler: expected $CXX, c++, g++ or clang++; found none")
    files = sorted(SOURCES.glob("*.cpp"))
    key = hashlib.sha256(repr((found, _FLAGS, platform.machine(), _processor())).encode())
    for path in (*files, *sorted(SOURCES.glob("*.h"))):
        key.update(path.read_bytes())
    target = CACHE / f"{key.hexdigest()[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(found, files, target)
    return target


def _compile(found: str, files: list[Path], target: Path) -> None:
    """Compile in a folder beside the target, then move the library there: a run may end in between."""
    folder = target.with_suffix(".unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def run(*arguments: object) -> None:
        done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the PTX emulator does not compile with {found}:\n{done.stderr}")

    # Headers that nearly every file includes took half of the time: they are compiled once.
    common = folder / "common.h"
    common.write_text(f'#include <algorithm>\n#include "{SOURCES}/decoder.h"\n')
    run(*_FLAGS, "-x", "c++-header", common, "-o", f"{common}.gch")
    flags = (*_FLAGS, "-include", common)
    objects = [folder / f"{path.stem}.o" for path in files]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda pair: run(*flags, "-c", pair[0], "-o", pair[1]), zip(files, objects, strict=True)):
            pass
    run("-shared", *objects, "-o", folder / "emulator.so")
    (folder / "emulator.so").rename(target)
    shutil.rmtree(folder)


def _processor() -> str:
    """Processor features, on which `-march=native` depends: a checkout shared by machines holds a library for each."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return platform.processor()
    return flags
