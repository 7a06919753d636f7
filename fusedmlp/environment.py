"""Every environment switch of fusedmlp; those of kernels and tiles are read once, when the operators are imported.

| variable                        | values | effect                                                                   |
|---------------------------------|--------|--------------------------------------------------------------------------|
| `FUSEDMLP_DENSE_DUMMY`          | 0, 1   | 1: the zero gradient put into `.grad` of a fused parameter is a dense,   |
|                                 |        | writable tensor instead of an expanded scalar (see `contract/dummy.py`)  |
| `FUSEDMLP_SPECIALISED`          | 0, 1   | 1: use warp-specialized kernels where there are any (Hopper and          |
|                                 |        | sm_100, 16 bits, long loads); 0, the default: only those that were tuned |
| `FUSEDMLP_TUNED`                | 0, 1   | 1: use the tiles that `python -m fusedmlp tune` found for this GPU       |
| `FUSEDMLP_CACHE`                | folder | where tuned tiles are kept; default `~/.cache/fusedmlp`                  |
| `FUSEDMLP_UNSUPPORTED_VERSIONS` | 0, 1   | 1: warn instead of raising where torch or Triton is too old. Set by      |
|                                 |        | `python -m bench.gpu --unsupported-versions`; gradients can be wrong     |
| `TRITON_INTERPRET`              | 0, 1   | Triton's own: 1 runs the kernels on the CPU; set it before importing     |
"""

from __future__ import annotations

import os
from pathlib import Path

_FLAGS = (
    "FUSEDMLP_DENSE_DUMMY",
    "FUSEDMLP_SPECIALISED",
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


def specialised() -> bool:
    """Whether warp-specialized kernels are used wherever there are any."""
    return _flag("FUSEDMLP_SPECIALISED")


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
    """Switches that are set, by name; raises if a value is wrong."""
    for name in _FLAGS:
        _flag(name)
    return {name: os.environ[name] for name in (*_FLAGS, "FUSEDMLP_CACHE") if name in os.environ}
