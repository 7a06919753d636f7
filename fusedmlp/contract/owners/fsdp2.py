"""PyTorch's FSDP2, `torch.distributed.fsdp.fully_shard`, by its private classes, as its parameters have no mark."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

NAME = "FSDP2 (fully_shard)"
ADVICE = "use accumulate_wgrad='grad' without delay, and fusedmlp.integrations.fsdp2.accumulate_in to keep it in fp32"
# For the error about buffers, which get its DTensors:
SHARDED = (
    "FSDP2 reduces .grad: step from that, with accumulate_wgrad='grad' and fusedmlp.integrations.fsdp2.accumulate_in"
)
_known = WeakTensorKeyDictionary()  # whether FSDP2 owns a parameter: it keeps its owner


def present() -> bool:
    """Tell whether some module went through `fully_shard`."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:  # fully_shard was never imported
        return False
    from torch.distributed._composable_state import _module_state_mapping

    return bool(_module_state_mapping)


def owns(param: Tensor) -> bool:
    """Tell whether it is the unsharded parameter of a module that went through `fully_shard`."""
    if param not in _known:
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        states: list[Any] = [state() for state in list(_module_state_mapping.values())]
        theirs = [state for state in states if isinstance(state, FSDPState)]
        _known[param] = any(param is other for state in theirs for other in unsharded_params(state))
    return bool(_known[param])


def unsharded_params(state: Any) -> list[Tensor]:
    """The unsharded parameters of one of FSDP2's states, those that it has gathered at least once."""
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    params = [p for group in filter(None, groups) for p in group.fsdp_params]
    return [p._unsharded_param for p in params if hasattr(p, "_unsharded_param")]
