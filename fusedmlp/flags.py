"""Arguments that are True or False."""

from __future__ import annotations

from torch import Tensor


def check_flag(name: str, value: object) -> None:
    """Check a boolean: any other value would count as True or False by chance ("no" is True)."""
    if isinstance(value, Tensor) or getattr(value, "ndim", False) or value not in (0, 1):
        raise TypeError(f"{name}: expected True or False; got {type(value).__name__} {value!r}"[:200])
