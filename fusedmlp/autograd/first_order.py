"""Makes double backward raise: autograd does not record writes into given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusedmlp.contract.engine import fail_when_differentiated

_Grads = TypeVar("_Grads")


def refuse_second_order(grads: _Grads, sources: Sequence[Tensor | None], way: str) -> _Grads:
    """Under `create_graph=True`: return the gradients with a graph that raises if they are differentiated.

    `torch.autograd.function.once_differentiable` does not suffice: where the incoming gradient is a constant, as for
    `y.sum()`, it returns constants, and a gradient penalty would lose its own gradient without an error.

    Args:
        grads: the gradients that a backward returns: tensors and None, also in lists.
        sources: the tensors from which they were computed.
        way: description of the second differentiation, for the message.
    """
    if not torch.is_grad_enabled():
        return grads
    recorded = [tensor for tensor in sources if tensor is not None and tensor.requires_grad]
    leaves, spec = tree_flatten(grads)
    found = [leaf for leaf in leaves if leaf is not None]
    if not recorded or not found:
        return grads
    message = f"fusedmlp: expected first-order gradients alone; got double backward {way}, which is not supported"
    marked = iter(fail_when_differentiated(message, found, recorded))
    result: _Grads = tree_unflatten([None if leaf is None else next(marked) for leaf in leaves], spec)
    return result
