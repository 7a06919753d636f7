"""Versions of torch and Triton: those supported, those found, and the check that `import fusedmlp` begins with.

Outside them gradients are wrong without an error (docs/limits.md), so the import raises. `bench.gpu` alone sets the
switch that turns this into a warning.
"""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

from fusedmlp import environment

OLDEST = {"torch": "2.13", "triton": "3.7"}
TESTED = {"torch": ("2.13.0", "2.15.0"), "triton": ("3.7.1", "3.8.0", "3.9.0")}  # by .ci/run


def found(package: str) -> str | None:
    """The version that is installed; None if there is none. Does not import Triton, which a CPU does without."""
    if package == "torch":
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problem() -> str:
    """The versions that are supported and those found, as one sentence; empty if each is supported."""
    versions = {package: found(package) for package in OLDEST}
    if all(each is None or _numbers(each) >= _numbers(OLDEST[package]) for package, each in versions.items()):
        return ""
    expected = " and ".join(f"{package}>={oldest}" for package, oldest in OLDEST.items())
    got = " and ".join(f"{package} {each or 'not installed'}" for package, each in versions.items())
    return f"fusedmlp: expected {expected}; got {got}, with which gradients can be wrong: install newer ones"


def check() -> None:
    """Raise if a version is not supported; warn instead under the switch of `bench.gpu`.

    Raises:
        ImportError: torch or Triton is too old.
    """
    message = problem()
    if message and not environment.unsupported_versions():
        raise ImportError(message)
    if message:
        warnings.warn(f"{message}. FUSEDMLP_UNSUPPORTED_VERSIONS=1 is for bench.gpu: do not train", stacklevel=2)


def _numbers(text: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
