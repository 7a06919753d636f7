"""Facts about the installation and the machine: versions, the GPU, integrations that can be imported."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

import torch

from fusedmlp import environment, versions
from fusedmlp.integrations import INTEGRATIONS
from fusedmlp.recipe import BLOCKS, LEAST_ROWS, check_blocks, formats
from fusedmlp.version import __version__


@dataclass(frozen=True)
class Machine:
    """Versions, the GPU if there is one, and the problems with them (empty: none)."""

    fusedmlp: str
    commit: str | None  # of a clone, with "-dirty" if files differ from it, or what pip installed from Git
    python: str
    system: str
    torch: str
    triton: str | None
    supported: dict[str, str]  # by package
    gpu: str | None
    architecture: str | None  # its table of tiles, such as "sm_90"
    driver: str | None
    memory_bytes: int | None
    multiprocessors: int | None
    implementation: str  # what impl="auto" means for tensors on the GPU, or on the CPU without one
    why: str  # why that implementation
    compiled: str  # whether layers run inside of the graphs of torch.compile, or why they do not
    warp_specialized: str  # whether warp-specialized kernels are used, or why they cannot be
    switches: dict[str, str]  # environment variables that are set
    problems: list[str]


def machine() -> Machine:
    """Collect facts without launching a kernel; unset switches that have a wrong value."""
    problems = [unsupported] if (unsupported := versions.problem()) else []
    gpu = architecture = memory = multiprocessors = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu, memory, multiprocessors = properties.name, properties.total_memory, properties.multi_processor_count
        try:
            architecture = _architecture()
        except (ModuleNotFoundError, RuntimeError) as error:
            problems.append(f"GPU: the kernels cannot run on it: {error}")
    for switch, wrong in environment.wrong().items():
        problems.append(wrong)
        del os.environ[switch]  # the rest of the report is as if it was not set
    implementation, why = _implementation(gpu)
    return Machine(
        __version__,
        commit(Path(__file__).parents[2]),
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
        versions.compiler_problem() or "layers run inside of its graphs",
        _warp_specialized(),
        environment.switches(),
        problems,
    )


def commit(root: Path) -> str | None:
    """The commit of a clone in `root`, else the commit from which pip installed fusedmlp; None if neither is known."""
    if (root / ".git").exists() and shutil.which("git"):  # not of a repository that merely holds this environment
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            return done.stdout.strip()
    try:
        origin = json.loads(distribution("fusedmlp").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None
    found: str | None = origin.get("vcs_info", {}).get("commit_id")
    return found


def supported_versions() -> dict[str, str]:
    """By package, the versions that `import fusedmlp` accepts and the versions that are tested."""
    return {
        package: f"{oldest} or newer, tested with {', '.join(versions.TESTED[package])}"
        for package, oldest in versions.OLDEST.items()
    }


def eight_bit(E: int, H: int, F: int, R: int) -> dict[str, str]:
    """By 8-bit recipe, the format in which a layer of these sizes multiplies, or why the layer refuses the recipe."""
    return {recipe: _computed(recipe, E, H, F, R) for recipe in BLOCKS}


def _computed(recipe: str, E: int, H: int, F: int, R: int) -> str:
    try:
        check_blocks(recipe, "fc2_weight", H, F)
    except ValueError as error:
        return f"refused: {error}"
    if formats(recipe, "recipe", R / E).gemms:
        return "in 8 bits, where there are kernels for it"
    return f"in bf16, as for every layer with fewer than {LEAST_ROWS} rows an expert on average"


def _warp_specialized() -> str:
    if versions.found("triton") is None:
        return "no: triton is not installed"
    from fusedmlp.kernels.warp_specialized import gluon_missing

    missing = gluon_missing()
    if missing:
        return f"no: {missing}"
    asked = environment.warp_specialized()
    if asked is None:
        return "yes, on Hopper; FUSEDMLP_WARP_SPECIALIZED=1 uses them on sm_100, too, where no GPU has timed them"
    return "yes, on Hopper and sm_100" if asked else "only where tuned: FUSEDMLP_WARP_SPECIALIZED=0"


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
    """The version of the GPU driver, from nvidia-smi or rocm-smi; None if neither says."""
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
class Importable:
    """A library that fusedmlp integrates with, and whether the integration can be imported."""

    name: str
    version: str | None  # None: not installed
    module: str  # fusedmlp's module for it
    ok: bool  # whether that module can be imported
    why_not: str


def integrations() -> list[Importable]:
    """Import the integration of each library that is installed; the row of any other says how to install it."""
    rows = []
    for name, package, module, library, _ in INTEGRATIONS:
        ours, why_not = f"fusedmlp.integrations.{module}", ""
        if find_spec(library or package) is None:
            why_not = f"not installed: pip install {package}"
        else:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about optional packages that the library does not find
                    import_module(ours)
            except Exception as error:  # whatever a library raises when imported is what the user needs to see
                why_not = f"import {ours}: {type(error).__name__}: {error}".splitlines()[0]
        rows.append(Importable(name, _version(package), ours, not why_not, why_not))
    return rows
