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
from fusedmlp.contract.destinations.destination import Route, Targets
from fusedmlp.contract.destinations.grad import Grad, existing_grad
from fusedmlp.contract.parameter_state import Place


def _to_local() -> Any:
    """PyTorch's class of the graph nodes of `DTensor.to_local()`; None as long as DTensors are not imported."""
    api = sys.modules.get("torch.distributed.tensor._api")
    return getattr(getattr(api, "_ToTorchTensor", None), "_backward_cls", None)


def local_weights(weights: Sequence[Tensor]) -> dict[Any, Tensor]:
    """The weights that are results of `DTensor.to_local()`, by the graph node that made them; none if the first is not.

    Kept from forward to backward, because saved-tensor hooks hand back other tensors, without hooks.
    """
    kind = _to_local()
    if kind is None or not isinstance(weights[0].grad_fn, kind):
        return {}
    return {weight.grad_fn: weight for weight in weights if isinstance(weight.grad_fn, kind)}


class ShardedGrad(Grad):
    """Add to the local tensor of a DTensor's `.grad`."""

    def find(self, params: Sequence[Tensor]) -> list[bool]:
        """Find weights of which the first is a result of `.to_local()`."""
        return [bool(local_weights(params))] * len(params)

    def existing(self, route: Route, others: Sequence[Tensor]) -> Targets:
        """Add local tensors to the `.grad`s of parameters that are leaves themselves."""
        leaves = [(i, weight, leaf) for i, weight in enumerate(route.params) if (leaf := _leaf(weight)) is not None]
        targets = super().existing(route, [leaf for *_, leaf in leaves])
        for i, weight, leaf in leaves:
            if route.may_add(leaf):
                targets[i] = _local_grad(weight, leaf, route.place(i))
        return targets


def _leaf(weight: Tensor) -> Any:
    """The DTensor leaf behind the `.to_local()` that made `weight`, if the engine only accumulates its gradient.

    None if there is no such weight, if something else reads its gradient, or if a mesh dimension is not sharded: over
    that one, the local gradient may be a part of a sum.
    """
    kind, node = _to_local(), weight.grad_fn
    if kind is None or not isinstance(node, kind):
        return None
    leaf_node, placements = node.next_functions[0][0], node.dtensor_spec.placements
    if (
        engine.engine_use(leaf_node, node) is not engine.ACCUMULATE
        or weight._backward_hooks
        or weight.retains_grad
        or node.grad_placements not in (None, placements)
        or not all(placement.is_shard() for placement in placements)
    ):
        return None
    return leaf_node.variable


def _local_grad(weight: Any, leaf: Any, place: Place) -> Tensor | None:
    """The local tensor of the leaf's `.grad`, if a GEMM may add to it; None: the gradient is returned.

    If there is no `.grad`, and it is to have another dtype than the weight (`grad_dtype`), it becomes zeros, as a
    returned gradient would be rounded to the dtype of the weight.
    """
    spec = weight.grad_fn.dtensor_spec
    if leaf.grad is None and leaf.grad_dtype not in (None, weight.dtype):
        zeros = torch.zeros_like(weight, dtype=leaf.grad_dtype, requires_grad=False)
        leaf.grad = type(leaf).from_local(
            zeros, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    grad = leaf.grad
    if type(grad) is not type(leaf) or (grad.device_mesh, grad.placements) != (spec.mesh, spec.placements):
        return None
    target = existing_grad(leaf, weight, grad._local_tensor, place, returnable=True)
    if target is not None:
        torch.autograd.graph.increment_version(grad)  # the GEMM's write counts for its local tensor alone
    return target
