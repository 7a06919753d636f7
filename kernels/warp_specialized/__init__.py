"""Code that the Gluon kernels share: partitions of warps, the ring of stages, the walk over tiles, operands, and the
MMAs of Hopper and Blackwell.
"""

from functools import lru_cache

import triton

from ..tiles.select import Target


@lru_cache
def gluon_missing() -> str:
    """Message that says why this Triton cannot compile warp-specialized kernels; empty if it can."""
    try:
        from . import gluon_compat  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} has no Gluon that fits: {error}"
    return ""


def refusal(target: Target, *, described: bool, gathered: int = 0, vectors: bool = True, segments: int = 1) -> str:
    """Why a warp-specialized kernel of 16 bits cannot do a launch; empty if it can. Plans, doctor and tests ask this.

    Args:
        target: the GPU.
        described: whether descriptors fit the operands that TMA loads: all but rows that threads copy.
        gathered: operands whose rows are gathered; threads copy them on Hopper, TMA gathers them on Blackwell.
        vectors: whether gathered rows can be loaded as vectors.
        segments: micro-batches of wgrad.
    """
    if missing := gluon_missing():
        return missing
    if not described:
        return "no descriptor fits an operand"
    if target.consumers == 2:
        if gathered > 1:  # each thread arrives once a step
            return "threads copy the rows of one operand"
        return "" if vectors or not gathered else "gathered rows do not start, or are not, multiples of 16 elements"
    return "TMA gathers rows of one micro-batch" if gathered and segments > 1 else ""
