"""Finds the owner that reduces a parameter's `.grad` over ranks: DDP, FSDP2 or DeepSpeed."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fusedmlp.contract.destination import Place, label
from fusedmlp.contract.parameter_state import ParameterState

_GRAD = "use accumulate_wgrad='grad' without delay, "
# Reducers, and the advice for each.
_DDP = "DistributedDataParallel", f"{_GRAD}or leave the parameter out of DDP and reduce main_grad yourself"
_FSDP2 = "FSDP2 (fully_shard)", f"{_GRAD}and fusedmlp.integrations.fsdp2.accumulate_in to keep it in fp32"
_DEEPSPEED = "DeepSpeed", "use accumulate_wgrad='auto' without main_grad and without delay"


class Reducers(NamedTuple):
    """Reducers of `.grad` in this process."""

    ddp_params: list[set[int]]  # ids of parameters, a set for each DistributedDataParallel
    fsdp2: bool
    deepspeed: bool


def find_reducers() -> Reducers | None:
    """The reducers in this process; None if there are none, as nearly always under Megatron."""
    found = Reducers(_ddp_params(), _uses_fsdp2(), "deepspeed" in sys.modules)
    return found if any(found) else None


def refuse_reducer(param: Tensor, state: ParameterState, reducers: Reducers, place: Place, delayed: bool) -> None:
    """Raise if something reduces `.grad` of this parameter, as its gradient goes to `main_grad`, or is delayed."""
    if state.fsdp2 is None and reducers.fsdp2:  # a parameter keeps its owner
        state.fsdp2 = any(param is other for other in _fsdp2_params())
    if state.fsdp2:
        reducer, advice = _FSDP2
    elif any(id(param) in ids for ids in reducers.ddp_params):
        if not torch.compiler.is_compiling():  # Dynamo cannot trace gc.collect
            gc.collect()  # an unreferenced DDP reduces nothing
        if not any(id(param) in ids for ids in _ddp_params()):
            return
        reducer, advice = _DDP
    elif reducers.deepspeed and _is_deepspeeds(param):
        reducer, advice = _DEEPSPEED
    else:
        return
    raise RuntimeError(
        f"{label(place)}: {reducer} reduces this parameter's .grad when backward ends, and would miss "
        f"{'a delayed gradient' if delayed else 'one in main_grad'}; {advice}"
    )


_ddps: weakref.WeakKeyDictionary[DistributedDataParallel, set[int] | None] = weakref.WeakKeyDictionary()


def _remember_ddp(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """PyTorch's hook, called when a module gets a submodule: a DDP gets the module that it wraps when it is made."""
    if isinstance(parent, DistributedDataParallel):
        _ddps.setdefault(parent, None)


register_module_module_registration_hook(_remember_ddp)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # DDPs made before this import
    _ddps.update({module: None for module in gc.get_objects() if issubclass(type(module), DistributedDataParallel)})


def _ddp_params() -> list[set[int]]:
    """For each living `DistributedDataParallel`: the ids of the parameters that it reduces."""
    running = DistributedDataParallel._get_active_ddp_module()
    if running is not None and running not in _ddps:  # a copy, which no hook has seen
        _ddps[running] = None
    return [_params_of(ddp, ids) for ddp, ids in list(_ddps.items())] if _ddps else []


def _params_of(ddp: DistributedDataParallel, ids: set[int] | None) -> set[int]:
    if ids is None:  # read once: a DDP keeps the parameters that it was made with
        ids = _ddps[ddp] = {id(param) for param in (*ddp._module_parameters, *ddp._delay_all_reduce_params)}
    return ids


def _uses_fsdp2() -> bool:
    """Whether some module went through FSDP2's `fully_shard`."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:  # fully_shard was never imported
        return False
    from torch.distributed._composable_state import _module_state_mapping

    return bool(_module_state_mapping)


def _fsdp2_params() -> list[Tensor]:
    """The unsharded parameters of all modules that went through FSDP2's `fully_shard`.

    The parameter itself has no mark, so this reads the private registry of FSDP2's states.
    """
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    states: list[Any] = [state() for state in list(_module_state_mapping.values())]
    return [param for state in states if isinstance(state, FSDPState) for param in unsharded_params(state)]


def unsharded_params(state: Any) -> list[Tensor]:
    """The unsharded parameters of one of FSDP2's states, those that it has gathered at least once."""
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    params = [p for group in filter(None, groups) for p in group.fsdp_params]
    return [p._unsharded_param for p in params if hasattr(p, "_unsharded_param")]


def _is_deepspeeds(param: Tensor) -> bool:
    """Whether DeepSpeed's optimizer owns a parameter: it has its attributes, or its hook, which removes `.grad`."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return (
        hasattr(param, "_hp_mapping")
        or hasattr(param, "ds_id")
        or any(getattr(hook, "__module__", "").startswith("deepspeed") for hook in hooks.values())
    )
