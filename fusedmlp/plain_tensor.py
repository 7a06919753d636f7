"""Which tensors kernels may take: those that are nothing but their memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_PLAIN: tuple[type[Tensor], ...] = (FakeTensor, FunctionalTensor)  # the compiler's own
if torch.distributed.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # every operator waits for it

    _PLAIN += (AsyncCollectiveTensor,)


def is_plain(tensor: Tensor) -> bool:
    """Whether operators work on this tensor's memory, once.

    A subclass with a `__torch_dispatch__` (DTensor, quantised weights) runs an operator as it likes: on other tensors,
    or several times, and one that adds to a plain `main_grad` would then be wrong in silence.
    """
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(tensor, _PLAIN)
