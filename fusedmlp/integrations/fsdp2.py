"""FSDP2 (`torch.distributed.fsdp.fully_shard`): accumulate gradients in the dtype in which they are reduced.

See docs/fsdp2.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fusedmlp import validate
from fusedmlp.contract.owners.fsdp2 import unsharded_params


def accumulate_in(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Keep `.grad` of unsharded parameters in `dtype`, for `MixedPrecisionPolicy(reduce_dtype=dtype)`.

    By default every micro-batch's gradient is computed in `param_dtype`, and FSDP2 casts and adds it. After this call,
    with `accumulate_wgrad="auto"` or "grad", the weight-gradient GEMM itself adds in `dtype`, and nothing is rounded,
    cast or copied. Applies to all parameters of the model: FSDP2 needs one gradient dtype in each of its groups.

    Args:
        model: after all calls of `fully_shard` on it and on its parts.
        dtype: the policy's `reduce_dtype`.

    Raises:
        TypeError: the model is no module.
        ValueError: no part of the model went through `fully_shard`, or one has another `reduce_dtype`.
    """
    validate.module("model", model)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("model: expected parts that went through fully_shard; got none. Call fully_shard first")
    for module in sharded:
        policy = module._get_fsdp_state()._mp_policy
        if (policy.reduce_dtype or policy.param_dtype or dtype) != dtype:
            raise ValueError(
                f"model: expected MixedPrecisionPolicy(reduce_dtype={dtype}), as FSDP2 casts gradients to that; got "
                f"{policy}"
            )

    def set_grad_dtype(module: Any, args: Any) -> None:
        for param in unsharded_params(module._get_fsdp_state()):
            if param.requires_grad:
                param.grad_dtype = dtype

    # Outside of graphs, as FSDP2's own hooks: Dynamo cannot set `grad_dtype`, and fullgraph=True would raise.
    hook = torch.compiler.disable(set_grad_dtype)
    for module in sharded:  # runs after FSDP2's own hook, which unshards
        module.register_forward_pre_hook(hook)
