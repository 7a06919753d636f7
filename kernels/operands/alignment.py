"""Whether loads by pointers can be vectors, judged on the host from addresses, strides and sizes: nothing synchronises.

Triton compiles one kernel for arguments that are multiples of 16 and another for the rest. The other knows nothing of
where rows start, loads element by element, and keeps an address for each: it needs smaller tiles (path "unaligned").
"""

from __future__ import annotations

from collections.abc import Sequence

from .arrays import Array
from .expert_tensors import ExpertTensors

_MULTIPLE = 16  # of bytes for an address, of elements for a stride or a size


def vectors_fit(arrays_RC: Sequence[Array], experts: Sequence[ExpertTensors], sizes: Sequence[int]) -> bool:
    """Whether rows of all these matrices, none wider than `sizes`, can be loaded and stored as vectors."""
    numbers = [*sizes, *(group.stride_e for group in experts)]
    numbers += [stride for group in experts for stride in group.strides if stride != 1]
    numbers += [number for array in arrays_RC for number in (array.address, array.strides[0])]
    return all(group.aligned for group in experts) and all(number % _MULTIPLE == 0 for number in numbers)
