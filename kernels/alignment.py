"""Whether loads by pointers can be vectors, judged on the host from addresses, strides and sizes: nothing synchronises.

Triton compiles one kernel for arguments that are multiples of 16 and another for the rest. The other knows nothing of
where rows start, loads element by element, and keeps an address for each: it needs smaller tiles (path "unaligned").
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .expert_tensors import ExpertTensors

_MULTIPLE = 16  # of bytes for an address, of elements for a stride or a size


def vectors_fit(tensors_RC: Sequence[Tensor], experts: Sequence[ExpertTensors], sizes: Sequence[int]) -> bool:
    """Whether rows of all those matrices, of which none is wider than `sizes`, can be loaded and stored as vectors."""
    elements = [*sizes, *(t.stride(0) for t in tensors_RC)]
    for group in experts:
        elements += [group.stride_e, *(stride for stride in group.strides if stride != 1)]
    return (
        all(group.aligned for group in experts)
        and all(t.data_ptr() % _MULTIPLE == 0 for t in tensors_RC)
        and all(n % _MULTIPLE == 0 for n in elements)
    )
