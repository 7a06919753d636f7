"""PyTorch's `DistributedDataParallel`: every instance that is alive."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

NAME = "DistributedDataParallel"
ADVICE = "use accumulate_wgrad='grad' without delay, or leave the parameter out of DDP and reduce main_grad yourself"
_ddps: weakref.WeakKeyDictionary[DistributedDataParallel, set[int] | None] = weakref.WeakKeyDictionary()


def _remember(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """PyTorch's hook, called when a module gets a submodule: a DDP gets the module that it wraps when it is made."""
    if isinstance(parent, DistributedDataParallel):
        _ddps.setdefault(parent, None)


register_module_module_registration_hook(_remember)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # DDPs made before this import
    _ddps.update({module: None for module in gc.get_objects() if issubclass(type(module), DistributedDataParallel)})


def present() -> bool:
    """Tell whether there is a DDP; notes the one that runs, which no hook has seen if it is a copy."""
    running = DistributedDataParallel._get_active_ddp_module()
    if running is not None and running not in _ddps:
        _ddps[running] = None
    return bool(_ddps)


def owns(param: Tensor) -> bool:
    """Tell whether a DDP was made with the parameter."""
    if not _has(param):
        return False
    if not torch.compiler.is_compiling():  # Dynamo cannot trace gc.collect
        gc.collect()  # an unreferenced DDP reduces nothing
    return _has(param)


def _has(param: Tensor) -> bool:
    for ddp, ids in list(_ddps.items()):
        if ids is None:  # read once: a DDP keeps the parameters that it was made with
            ids = _ddps[ddp] = {id(param) for param in (*ddp._module_parameters, *ddp._delay_all_reduce_params)}
        if id(param) in ids:
            return True
    return False
