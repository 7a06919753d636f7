"""Code that the Gluon kernels share: partitions of warps, the ring of stages, the walk over tiles, operands, the MMAs
of Hopper and Blackwell, and tiles that are staged in shared memory.
"""

from collections.abc import Sequence
from functools import lru_cache

import triton

from ..operands.alignment import vectors_fit
from ..operands.arrays import Array
from ..tiles.select import Target
from ..tiles.table import Recipe


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


def stages(target: Target, recipe: Recipe, arrays_RC: Sequence[Array]) -> bool:
    """True if tiles of these matrices are staged in shared memory before they are quantized: for fp8_block on Hopper,
    with rows of 16 bits that can be copied as vectors.
    """
    if recipe != "fp8_block" or target.architecture != "sm_90" or gluon_missing():
        return False
    sizes = [array.shape[1] for array in arrays_RC]
    return all(array.dtype.itemsize == 2 for array in arrays_RC) and vectors_fit(arrays_RC, [], sizes)
