"""Facts about the installation and the machine: versions, the GPU, 8-bit recipes, integrations that can be imported."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fusedmlp import environment, versions
from fusedmlp.integrations import INTEGRATIONS
from fusedmlp.recipe import BLOCKS, LEAST_ROWS, check_blocks, formats
from fusedmlp.version import __version__


def machine() -> dict[str, Any]:
    """Versions, the GPU, what runs here and why, and `problems`; unset switches that have a wrong value."""
    problems = [unsupported] if (unsupported := versions.problem()) else []
    for switch, wrong in environment.wrong().items():
        problems.append(wrong)
        del os.environ[switch]  # the rest of the report is as if it was not set
    gpu: dict[str, Any] = dict.fromkeys(("gpu", "architecture", "driver", "memory_gib", "multiprocessors"))
    implementation, why = "torch", f"torch {torch.__version__} is a build for the CPU"
    if torch.cuda.is_available():
        implementation, why = "triton", "tensors on a GPU"
        properties = torch.cuda.get_device_properties(0)
        gpu |= {"gpu": properties.name, "driver": _driver(), "memory_gib": round(properties.total_memory / 2**30, 1)}
        gpu["multiprocessors"] = properties.multi_processor_count
        try:
            from fusedmlp.kernels.tiles import select  # needs Triton

            gpu["architecture"] = select.architecture(torch.device("cuda", 0))
        except (ModuleNotFoundError, RuntimeError) as error:
            problems.append(f"GPU: the kernels cannot run on it: {error}")
    elif torch.version.cuda or torch.version.hip:
        why = "torch finds no GPU (see its driver, and CUDA_VISIBLE_DEVICES)"
    tested = {package: ", ".join(of_package) for package, of_package in versions.TESTED.items()}
    return {
        "fusedmlp": __version__,
        "commit": commit(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "torch": torch.__version__,
        "triton": versions.found("triton"),
        **{f"supported_{name}": f"{old} or newer, tested with {tested[name]}" for name, old in versions.OLDEST.items()},
        **gpu,
        "implementation": implementation,  # by impl="auto", for tensors on the GPU, or on the CPU without one
        "why": why,
        "torch_compile": versions.compiler_problem() or "layers run inside of its graphs",
        "warp_specialized": _warp_specialized(),
        "switches": environment.switches(),
        "problems": problems,
    }


def commit(root: Path) -> str | None:
    """The commit of a clone in `root`, else the commit from which pip installed fusedmlp; None if neither is known."""
    git = "git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"
    if (root / ".git").exists() and (described := _run(*git)):  # not of a repository that merely holds the environment
        return described
    try:
        origin = json.loads(distribution("fusedmlp").read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])
    except (PackageNotFoundError, KeyError):
        return None


def _run(*command: str) -> str:
    """Return what a command prints; empty if it is not there or fails."""
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return "" if done.returncode else done.stdout.strip()


def _driver() -> str | None:
    """The version of the GPU driver; None if neither tool says."""
    nvidia = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    said = nvidia or _run("rocm-smi", "--showdriverversion", "--csv")
    return said.splitlines()[-1] if said else None


def _warp_specialized() -> str:
    if versions.found("triton") is None:
        return "no: triton is not installed"
    from fusedmlp.kernels.warp_specialized import gluon_missing

    if missing := gluon_missing():
        return f"no: {missing}"
    asked = environment.warp_specialized()
    if asked is None:
        return "yes, on Hopper; FUSEDMLP_WARP_SPECIALIZED=1 uses them on sm_100, too, where no GPU has timed them"
    return "yes, on Hopper and sm_100" if asked else "no, in 16 bits: FUSEDMLP_WARP_SPECIALIZED=0"


def eight_bit(E: int, H: int, F: int, R: int, batch_invariant: bool = False) -> dict[str, str]:
    """By 8-bit recipe, the format in which a layer of these sizes multiplies, or why the layer refuses the recipe."""
    short = f"in bf16, as for every layer with fewer than {LEAST_ROWS} rows an expert on average"
    computed = {}
    for recipe in BLOCKS:
        try:
            check_blocks(recipe, "fc2_weight", H, F)
            long = batch_invariant or formats(recipe, "recipe", R / E).gemms
            computed[recipe] = "in 8 bits, where there are kernels for it" if long else short
        except ValueError as error:
            computed[recipe] = f"refused: {error}"
    return computed


def integrations() -> list[dict[str, Any]]:
    """Import the integration of each library that is installed; the row of any other says how to install it."""
    rows = []
    for name, package, module, library, _ in INTEGRATIONS:
        ours, why_not = f"fusedmlp.integrations.{module}", ""
        try:
            with warnings.catch_warnings(action="ignore"):  # about optional packages that the library does not find
                if find_spec(library or package) is None:
                    why_not = f"not installed: pip install {package}"
                else:
                    import_module(ours)
        except Exception as error:  # whatever a library raises when imported is what the user needs to see
            why_not = f"import {ours}: {type(error).__name__}: {error}".splitlines()[0]
        rows.append({"name": name, "version": versions.found(package), "ok": not why_not, "why_not": why_not})
    return rows
