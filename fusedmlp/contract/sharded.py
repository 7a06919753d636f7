"""`.grad` of DTensor leaves: a weight that is the result of `.to_local()` has its gradient added to the local tensor.

`.to_local()` passes "no gradient" on to the leaf, whose AccumulateGrad then runs without one, and its hooks fire. The
private class that this file reads is PyTorch's; `tests/contract/test_dtensor_grad.py` fails when it changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.destination import Place, checked_grad


def local_weights(weights: Sequence[Tensor]) -> dict[Any, Tensor]:
    """The weights that are results of `DTensor.to_local()`, by the graph node that made them; none if the first is not.

    Kept from forward to backward, because saved-tensor hooks hand back other tensors, without hooks.
    """
    api = sys.modules.get("torch.distributed.tensor._api")
    kind = getattr(getattr(api, "_ToTorchTensor", None), "_backward_cls", None)
    if kind is None or not isinstance(weights[0].grad_fn, kind):
        return {}
    return {weight.grad_fn: weight for weight in weights if isinstance(weight.grad_fn, kind)}


def sharded_leaf(node: Any, weight: Tensor | None) -> Tensor | None:
    """The DTensor leaf behind the `.to_local()` that made `weight`, if the engine only accumulates its gradient.

    None if there is no such weight, if something else reads its gradient, or if a mesh dimension is not sharded: over
    that one, the local gradient may be a part of a sum.
    """
    if weight is None:
        return None
    leaf_node = node.next_functions[0][0]
    placements = node.dtensor_spec.placements
    if (
        engine.engine_use(leaf_node, node) is not engine.ACCUMULATE
        or weight._backward_hooks
        or weight.retains_grad
        or node.grad_placements not in (None, placements)
        or not all(placement.is_shard() for placement in placements)
    ):
        return None
    return leaf_node.variable  # type: ignore[no-any-return]


def local_grad(node: Any, leaf: Any, weight: Tensor, place: Place) -> Tensor | None:
    """The local tensor of the leaf's `.grad`, if a GEMM may add to it; None: the gradient is returned.

    If there is no `.grad`, and it is to have another dtype than the weight (`grad_dtype`), it becomes zeros, as a
    returned gradient would be rounded to the dtype of the weight.
    """
    spec = node.dtensor_spec
    if leaf.grad is None and leaf.grad_dtype not in (None, weight.dtype):
        zeros = torch.zeros_like(weight, dtype=leaf.grad_dtype, requires_grad=False)
        leaf.grad = type(leaf).from_local(
            zeros, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    grad = leaf.grad
    if type(grad) is not type(leaf) or (grad.device_mesh, grad.placements) != (spec.mesh, spec.placements):
        return None
    target = checked_grad(leaf, weight, grad._local_tensor, place, returnable=True)
    if target is not None:
        torch.autograd.graph.increment_version(grad)  # the GEMM's write counts for its local tensor alone
    return target
