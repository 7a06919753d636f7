"""Code that the Gluon kernels share: partitions of warps, the ring of stages, Hopper, Blackwell."""

from functools import lru_cache

import triton


@lru_cache
def gluon_missing() -> str:
    """What warp-specialized kernels miss in this Triton; empty if nothing."""
    try:
        from . import gluon_compat  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} has no Gluon that fits: {error}"
    return ""
