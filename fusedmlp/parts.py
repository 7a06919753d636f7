"""Calls of a layer's parts, the linear layers of its experts, for their tensors.

A fused layer computes fc1, the activation and fc2 at once, so its parts have no rows of their own to compute with. It
calls them nevertheless, as `part(None, None)`: then hooks that gather, offload or compute parameters run, and so do
parametrizations and wrappers. What would need rows or outputs of one part is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusedmlp.contract.owners.refusal import present_owners, refuse_owner


class ExpertTensors(NamedTuple):
    """Result of a linear layer of experts that is called without rows: its tensors, as `grouped_mlp` takes them."""

    weight: Tensor | Sequence[Tensor]
    bias: Tensor | Sequence[Tensor] | None


def tensors_of(layer: nn.Module, name: str) -> ExpertTensors:
    """Call the part `name` of a layer without rows and return its tensors.

    Raises:
        RuntimeError: a hook has freed the tensors after the call, or something reduces gradients of a `main_grad`.
        TypeError: the part is of a class that needs rows, or a hook or a wrapper of it wants rows or outputs.
    """
    part = getattr(layer, name)
    modules = list(part.modules())
    if any(module._backward_hooks or module._backward_pre_hooks for module in modules):
        raise TypeError(f"{_expected(layer, name)}; got a backward hook, which {_ADVICE}")
    try:
        tensors = part(None, None)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}, from a {type(part).__name__} or a hook of it, which"
        raise TypeError(f"{_expected(layer, name)}; got {got} {_ADVICE}") from error
    if not isinstance(tensors, ExpertTensors):
        got = f"a {type(tensors).__name__} from a {type(part).__name__} or a hook of it, which"
        raise TypeError(f"{_expected(layer, name)}; got {got} {_ADVICE}")
    if torch.compiler.is_compiling() or not (part._forward_hooks or len(modules) > 1):
        return tensors
    first = tensors.weight if isinstance(tensors.weight, Tensor) else tensors.weight[0]
    owners = [] if first.is_leaf else present_owners()
    for param in part.parameters() if owners else ():  # DeepSpeed's ZeRO 3 returns weights that are no parameters
        if getattr(param, "main_grad", None) is not None:
            refuse_owner(param, owners, (f"{name}_weight", None), "main_grad")
    if _is_freed(first):
        raise RuntimeError(
            f"{name}: expected its weights to stay after its own forward, as {type(layer).__name__} multiplies them "
            f"later; they are freed (use reshard_after_forward=False for {name}, or shard the whole layer)"
        )
    return tensors


_ADVICE = (
    "would compute with rows or outputs of this part: put it on the whole layer, parametrize the weights, or call two "
    "GroupedLinear with an activation between them"
)


def _expected(layer: nn.Module, name: str) -> str:
    return f"{name}: expected a part that {type(layer).__name__} can call without rows, for its tensors"


def _is_freed(weight: Tensor) -> bool:
    """Tell whether the memory of a weight is gone, as after FSDP's forward."""
    if weight.device.type == "meta" or type(weight) not in (Tensor, nn.Parameter):
        return False
    return weight.numel() > 0 and weight.untyped_storage().size() == 0
