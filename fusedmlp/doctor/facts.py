"""What is installed and what the machine has."""

from __future__ import annotations

import platform
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from fusedmlp import environment, versions
from fusedmlp.version import __version__


@dataclass(frozen=True)
class Machine:
    """Versions, the GPU if there is one, and what is wrong with them (empty: nothing)."""

    fusedmlp: str
    python: str
    system: str
    torch: str
    triton: str | None
    supported: dict[str, str]  # by package
    gpu: str | None
    architecture: str | None  # whose kernels it runs
    driver: str | None
    memory_bytes: int | None
    multiprocessors: int | None
    implementation: str  # that impl="auto" takes for tensors on the best device here
    why: str
    specialised: str  # whether warp-specialized kernels are used, or why they cannot be
    switches: dict[str, str]  # environment variables that are set
    problems: list[str]


def machine() -> Machine:
    """Look; starts no kernel."""
    problems = [unsupported] if (unsupported := versions.problem()) else []
    gpu = architecture = memory = multiprocessors = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu, memory, multiprocessors = properties.name, properties.total_memory, properties.multi_processor_count
        try:
            architecture = _architecture()
        except (ModuleNotFoundError, RuntimeError) as error:
            problems.append(f"GPU: the kernels cannot run on it: {error}")
    try:
        switches = environment.switches()
    except ValueError as error:
        switches = {}
        problems.append(str(error))
    implementation, why = _implementation(gpu)
    return Machine(
        __version__,
        platform.python_version(),
        platform.platform(terse=True),
        torch.__version__,
        versions.found("triton"),
        supported_versions(),
        gpu,
        architecture,
        _driver() if gpu else None,
        memory,
        multiprocessors,
        implementation,
        why,
        _specialised(),
        switches,
        problems,
    )


def supported_versions() -> dict[str, str]:
    """Versions that the import accepts, and those that are tested."""
    return {
        package: f"{oldest} or newer, tested with {', '.join(versions.TESTED[package])}"
        for package, oldest in versions.OLDEST.items()
    }


def _specialised() -> str:
    if versions.found("triton") is None:
        return "no: triton is not installed"
    from fusedmlp.kernels.warp_specialized import gluon_missing

    missing = gluon_missing()
    if missing:
        return f"no: {missing}"
    try:
        used = environment.specialised()
    except ValueError:
        used = False
    where = "on Hopper and sm_100"
    return f"yes, {where}" if used else f"only where tuned; FUSEDMLP_SPECIALISED=1 uses them {where}"


def _architecture() -> str:
    from fusedmlp.kernels.tiles import select  # needs Triton

    return select.architecture(torch.device("cuda", 0))


def _implementation(gpu: str | None) -> tuple[str, str]:
    if gpu is not None:
        return "triton", "tensors on a GPU"
    if torch.version.cuda is None and torch.version.hip is None:
        return "torch", f"torch {torch.__version__} is a build for the CPU"
    return "torch", "torch finds no GPU (see its driver, and CUDA_VISIBLE_DEVICES)"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The GPU driver's own version, by its tool."""
    for command in (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion", "--csv"],
    ):
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.strip().splitlines()[-1]
    return None


@dataclass(frozen=True)
class Integration:
    """One library that fusedmlp plugs into."""

    name: str
    version: str | None  # None: not installed
    module: str  # of fusedmlp that serves it
    ok: bool
    why_not: str


# Library as users know it, package, module to be found, module of ours that serves it.
_INTEGRATIONS = (
    ("Megatron-core", "megatron-core", "megatron.core", "fusedmlp.integrations.megatron"),
    ("Transformers", "transformers", "transformers", "fusedmlp.integrations.transformers"),
    ("torchtitan", "torchtitan", "torchtitan", "fusedmlp.integrations.torchtitan"),
    ("PyTorch DDP", "torch", "torch.distributed", "fusedmlp.integrations.ddp"),
    ("PyTorch FSDP2", "torch", "torch.distributed", "fusedmlp.integrations.fsdp2"),
)


def integrations() -> list[Integration]:
    """Import what serves each library that is installed; others are rows that say so."""
    found = []
    for name, package, library, ours in _INTEGRATIONS:
        why_not = ""
        if find_spec(library.split(".")[0]) is None:
            why_not = f"not installed: pip install {package}"
        else:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what those libraries do not find
                    import_module(ours)
            except Exception as error:  # whatever a library raises when imported is what the user needs to see
                why_not = f"import {ours}: {type(error).__name__}: {error}".splitlines()[0]
        found.append(Integration(name, _version(package), ours, not why_not, why_not))
    return found
