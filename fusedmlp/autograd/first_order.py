"""Makes a second differentiation of gradients raise: writes into given tensors are not recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusedmlp.contract.engine import fail_when_differentiated

_Grads = TypeVar("_Grads")


def refuse_second_order(grads: _Grads, sources: Sequence[Tensor | None], way: str) -> _Grads:
    """Under `create_graph=True`: the gradients, with a graph in which every way to `sources` raises.

    A silent zero would be wrong: `torch.autograd.function.once_differentiable` makes results constants where the
    incoming gradient is one, as for `y.sum()`, and a gradient penalty would lose its own gradient.

    Args:
        grads: what a backward returns: tensors and None, also in lists.
        sources: what they were computed from.
        way: what is being differentiated, for the message.
    """
    if not torch.is_grad_enabled():
        return grads
    recorded = [tensor for tensor in sources if tensor is not None and tensor.requires_grad]
    leaves, spec = tree_flatten(grads)
    found = [leaf for leaf in leaves if leaf is not None]
    if not recorded or not found:
        return grads
    marked = iter(fail_when_differentiated(f"fusedmlp: double backward {way} is not supported", found, recorded))
    result: _Grads = tree_unflatten([None if leaf is None else next(marked) for leaf in leaves], spec)
    return result
