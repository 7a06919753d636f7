"""The GPU as its driver describes it, by NVML if pynvml can be imported (nvidia-ml-py), else by nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from typing import Any

import torch
import triton

from bench.gpu import archive


def facts(device: str) -> dict[str, str] | None:
    """The columns that all rows of a run have in common; None without a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        return None
    absent = "no GPU" if device == "cpu" else f"no {device}"
    name, driver = (torch.cuda.get_device_name(), _smi("driver_version")) if device == "cuda" else (absent, "")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "commit": archive.commit()}
    return {"gpu": name, "driver": driver, **versions, "date": time.strftime("%Y-%m-%d")}


def _smi(field: str) -> str:
    """One property of the first GPU; empty where there is no such field, or no nvidia-smi, as in some containers."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.split("\n")[0].strip()


class Card:
    """Clock and energy of the GPU that torch uses."""

    def __init__(self, device: str) -> None:
        self._is_there, self._nvml, self._handle = device == "cuda", None, None
        if self._is_there:
            with suppress(Exception):
                self._nvml, self._handle = _nvml()

    def clock_mhz(self) -> str:
        """The multiprocessors' clock at this moment."""
        with suppress(Exception):  # some machines open NVML and refuse this
            if self._nvml:
                return str(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        return _smi("clocks.sm") if self._is_there else ""

    def joules(self) -> float | None:
        """Energy since the driver was loaded; None where nothing says it."""
        with suppress(Exception):
            if self._nvml:
                return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
            return float(_smi("total_energy_consumption")) / 1e3 if self._is_there else None
        return None


def _nvml() -> tuple[Any, Any]:
    import pynvml

    pynvml.nvmlInit()
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # torch's first may be another one of NVML's
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
