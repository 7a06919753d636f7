"""DeepSpeed's optimizers, which mark their parameters, or give them a hook that removes `.grad`."""

from __future__ import annotations

import sys

from torch import Tensor

NAME = "DeepSpeed"
ADVICE = "use accumulate_wgrad='auto' without main_grad and without delay"
# For errors about float32 accumulation, which gets its optimizers:
OWN_DTYPE = (
    "DeepSpeed's optimizers accumulate in a dtype of their own: see data_types.grad_accum_dtype of its configuration"
)


def present() -> bool:
    """Tell whether it was imported."""
    return "deepspeed" in sys.modules


def owns(param: Tensor) -> bool:
    """Tell whether the parameter has the attributes or the hook."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return (
        hasattr(param, "_hp_mapping")
        or hasattr(param, "ds_id")
        or any(getattr(hook, "__module__", "").startswith("deepspeed") for hook in hooks.values())
    )
