"""Triton on a CUDA driver that does nothing (`null_driver.c`), for a process of its own: see `cost.py`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "libcuda.so.1"
CAPABILITY, MULTIPROCESSORS = (9, 0), 132


def compiler() -> str:
    """The C compiler, chosen as Triton chooses it."""
    found = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if found is None:
        raise RuntimeError("null driver: expected a C compiler, as Triton does: $CC, cc, gcc or clang; got none")
    return found


def build() -> Path:
    """Build the library, once for each version of its source, and return its folder."""
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    key = hashlib.sha256(SOURCE.read_bytes() + (headers / "cuda.h").read_bytes()).hexdigest()[:16]
    folder = ROOT / "build" / "cache" / "null_driver" / f"{key}-{sysconfig.get_platform()}"
    if not (folder / LIBRARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{LIBRARY}.{os.getpid()}"  # two processes may build at once
        # fmt: off
        command = [compiler(), "-shared", "-fPIC", "-O2", f"-I{headers}", str(SOURCE), "-o", str(partial),
                   f"-Wl,-soname,{LIBRARY}"]
        # fmt: on
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"null driver: {' '.join(command)} failed:\n{done.stderr}")
        partial.replace(folder / LIBRARY)
    return folder


class Counters:
    """Calls of the driver so far."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._launches, self._descriptors = library.null_driver_launches, library.null_driver_descriptors
        self._launches.restype = self._descriptors.restype = ctypes.c_long

    def read(self) -> tuple[int, int]:
        """Launches, and tensor maps encoded."""
        return self._launches(), self._descriptors()


def install() -> Counters:
    """Give this process one GPU, an sm_90 that does nothing; tensors stay on the CPU."""
    folder = build()
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    library = ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia.driver import CudaDriver

    class NullDriver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda _=None: 0
            self.set_current_device = lambda _: None
            self.get_device_capability = lambda _=None: CAPABILITY

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    triton.runtime.driver.set_active(NullDriver())
    properties = SimpleNamespace(name="", multi_processor_count=MULTIPROCESSORS, gcnArchName="")
    torch.cuda.get_device_properties = lambda _=None: properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda _=None: CAPABILITY  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    return Counters(library)
