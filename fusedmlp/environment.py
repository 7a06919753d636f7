"""Reads the environment switches. docs/switches.md lists each with its values, its default and its effect."""

from __future__ import annotations

import os
import warnings
from difflib import get_close_matches

_FLAGS = (
    "FUSEDMLP_WARP_SPECIALIZED",
    "FUSEDMLP_UNSUPPORTED_VERSIONS",
    "FUSEDMLP_DEBUG",
    "TRITON_INTERPRET",
)


def _flag(name: str, default: bool = False) -> bool:
    value = os.environ.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1; got {value!r}")
    return value == "1"


def warp_specialized() -> bool | None:
    """Whether warp-specialized kernels are used wherever there are any; None: where a GPU has timed them."""
    return _flag("FUSEDMLP_WARP_SPECIALIZED") if "FUSEDMLP_WARP_SPECIALIZED" in os.environ else None


def unsupported_versions() -> bool:
    """Whether versions of torch and Triton that are too old only warn."""
    return _flag("FUSEDMLP_UNSUPPORTED_VERSIONS")


def debug() -> bool:
    """Whether counts, ids and gradients are checked on the host, which is slow."""
    return _flag("FUSEDMLP_DEBUG")


def triton_interpret() -> bool:
    """Whether Triton kernels run under the CPU interpreter."""
    return _flag("TRITON_INTERPRET")


def switches() -> dict[str, str]:
    """Switches that are set, by name."""
    return {name: os.environ[name] for name in _FLAGS if name in os.environ}


def warn_of_unknown() -> None:
    """Warn of variables that begin as switches do and are none: a misspelt one would have no effect."""
    for name in sorted(os.environ):
        if name.startswith("FUSEDMLP_") and name not in _FLAGS:
            close = get_close_matches(name, _FLAGS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            warnings.warn(f"{name}: expected a switch of docs/switches.md; got an unknown one{meant}", stacklevel=3)


def wrong() -> dict[str, str]:
    """Errors in the values of switches, by name."""
    errors = {}
    for name in _FLAGS:
        try:
            _flag(name)
        except ValueError as error:
            errors[name] = str(error)
    return errors
