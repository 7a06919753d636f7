"""Reads the environment switches. docs/switches.md lists each with its values, its default and its effect."""

from __future__ import annotations

import os
from pathlib import Path

_FLAGS = (
    "FUSEDMLP_DENSE_DUMMY",
    "FUSEDMLP_WARP_SPECIALIZED",
    "FUSEDMLP_TUNED",
    "FUSEDMLP_UNSUPPORTED_VERSIONS",
    "TRITON_INTERPRET",
)


def _flag(name: str, default: bool = False) -> bool:
    value = os.environ.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1; got {value!r}")
    return value == "1"


def dense_dummy() -> bool:
    """Whether dummies are dense and writable."""
    return _flag("FUSEDMLP_DENSE_DUMMY")


def warp_specialized() -> bool:
    """Whether warp-specialized kernels are used wherever there are any."""
    return _flag("FUSEDMLP_WARP_SPECIALIZED")


def tuned() -> bool:
    """Whether tiles tuned on this machine are used."""
    return _flag("FUSEDMLP_TUNED")


def cache_folder() -> Path:
    """Where tuned tiles are kept."""
    return Path(os.environ.get("FUSEDMLP_CACHE") or Path.home() / ".cache" / "fusedmlp")


def unsupported_versions() -> bool:
    """Whether versions of torch and Triton that are too old only warn."""
    return _flag("FUSEDMLP_UNSUPPORTED_VERSIONS")


def triton_interpret() -> bool:
    """Whether Triton kernels run under the CPU interpreter."""
    return _flag("TRITON_INTERPRET")


def switches() -> dict[str, str]:
    """Switches that are set, by name."""
    return {name: os.environ[name] for name in (*_FLAGS, "FUSEDMLP_CACHE") if name in os.environ}


def wrong() -> dict[str, str]:
    """What is wrong with the value of a switch, by its name."""
    found = {}
    for name in _FLAGS:
        try:
            _flag(name)
        except ValueError as error:
            found[name] = str(error)
    return found
