"""Code that the Gluon kernels share: partitions of warps, the ring of stages, Hopper, Blackwell."""

from functools import lru_cache

import triton


@lru_cache
def gluon_missing() -> str:
    """Message that says why this Triton cannot compile warp-specialized kernels; empty if it can."""
    try:
        from . import gluon_compat  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} has no Gluon that fits: {error}"
    return ""
