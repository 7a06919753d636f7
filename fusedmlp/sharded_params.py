"""Which parameters FSDP2 (`torch.distributed.fsdp.fully_shard`) gathered."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_known = WeakTensorKeyDictionary()  # parameter -> whether FSDP2 gathered it; a parameter keeps its owner


def gathered_by_fsdp2(param: Tensor) -> bool:
    """Whether a parameter is the unsharded form of one of FSDP2's, whose `.grad` it reduces when backward ends.

    Nothing is on the parameter itself that says so; the private registry of FSDP2's states is asked, once for each
    parameter.
    """
    known: bool | None = _known.get(param)
    if known is None:
        known = _known[param] = any(param is own for own in _unsharded_params())
    return known


def _unsharded_params() -> list[Tensor]:
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:  # nobody imported fully_shard
        return []
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    states: list[Any] = [state() for state in list(_module_state_mapping.values())]
    params = []
    for state in states:
        if isinstance(state, FSDPState):
            groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                params += [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    return params
