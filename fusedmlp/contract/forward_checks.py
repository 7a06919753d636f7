"""In forward: raise for what backward could not do, and note what only a forward can know."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.destination import Mode, Place, existing_main_grad, has_main_grad, label
from fusedmlp.contract.parameter_state import ParameterState, release_interrupted, state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients

# Who reduces, and what to do.
_DDP = "DistributedDataParallel", "or leave the parameter out of DDP and reduce main_grad yourself"
_FSDP2 = "FSDP2 (fully_shard)", "and fusedmlp.integrations.fsdp2.accumulate_in to keep it in fp32"


def enter_forward(name: str, weights: Sequence[Tensor], mode: Mode, *, delayed: bool) -> set[int]:
    """Check one weight (a packed tensor, or one per expert); returns the ids of those that stock DDP reduces."""
    if engine.inside_functorch_transform():
        raise RuntimeError(
            "fusedmlp inside a torch.func transform (grad, vmap, jvp, ...): expected plain autograd; the transform "
            "would bypass .grad and main_grad"
        )
    recomputing = engine.inside_backward()
    if recomputing:
        engine.nest_backwards()
    else:
        release_interrupted()
    ddp_params = _reduced_by_ddp(weights, recomputing)
    for i, weight in enumerate(weights):
        if not weight.requires_grad:
            continue
        place = name, None if len(weights) == 1 else i
        to_main_grad = mode == "main_grad" or (mode == "auto" and has_main_grad(weight))
        if (to_main_grad or delayed) and weight.is_leaf:
            state = state_of(weight)
            if to_main_grad and hasattr(weight, "grad_added_to_main_grad"):
                catch_plain_gradients(weight, state)
            if not torch.is_grad_enabled():
                continue
            refuse_reducer(weight, state, ddp_params, place, delayed)
            # Asking Megatron-FSDP would allocate; one that was right before, and still is that one, backward checks.
            known = state.checked[0]() is getattr(weight, "main_grad", state)
            if mode == "main_grad" and not known and not hasattr(weight, "__fsdp_param__"):
                existing_main_grad(weight, state, place)
        elif to_main_grad and torch.is_grad_enabled() and not weight.is_leaf:
            raise RuntimeError(
                f"{label(place)}: accumulate_wgrad={mode!r} needs a leaf parameter; got the result of "
                f"{weight.grad_fn}, through which only a returned gradient flows back: use accumulate_wgrad='off'"
            )
    return ddp_params


def _reduced_by_ddp(weights: Sequence[Tensor], recomputing: bool) -> set[int]:
    """Ids of the parameters of the DDP in whose forward the layer is.

    Of a reentrant checkpoint's second forward, in backward, DDP knows nothing; the first one ran under no_grad.
    """
    ddp = engine.active_ddp()
    if ddp is not None and not torch.is_grad_enabled():
        for weight in weights:
            state_of(weight).ddp = weakref.ref(ddp)
    elif ddp is None and recomputing and torch.is_grad_enabled():
        ddp = next((noted for weight in weights if (noted := state_of(weight).ddp()) is not None), None)
    return set() if ddp is None else engine.ddp_params(ddp)


def refuse_reducer(param: Tensor, state: ParameterState, ddp_params: Set[int], place: Place, delayed: bool) -> None:
    """Raise if something reduces `.grad` of a parameter whose gradient goes to `main_grad`, or comes later."""
    if state.fsdp2 is None:  # a parameter keeps its owner
        state.fsdp2 = any(param is own for own in engine.fsdp2_params())
    if state.fsdp2 or id(param) in ddp_params:
        reducer, advice = _FSDP2 if state.fsdp2 else _DDP
        raise RuntimeError(
            f"{label(place)}: {reducer} reduces this parameter's .grad when backward ends, and would miss "
            f"{'a delayed gradient' if delayed else 'one in main_grad'}; use accumulate_wgrad='grad' without delay, "
            f"{advice}"
        )
