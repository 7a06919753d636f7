"""Accumulate gradients of 16-bit parameters in float32, for optimizers that take 16-bit gradients.

    FP32Accumulation(model, optimizer)

Between steps of the optimizer `.grad` is float32, for gradient clipping too: a hook makes PyTorch add in float32, and
with `accumulate_wgrad="auto"` or "grad" the weight-gradient GEMMs add to it directly. For a step `.grad` is rounded
once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedmlp import validate
from fusedmlp.contract.engine import is_plain
from fusedmlp.contract.owners import deepspeed
from fusedmlp.contract.parameter_state import state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients
from fusedmlp.contract.steps import restore, watch_steps


class FP32Accumulation:
    """Keep `.grad` of a model's bf16 and fp16 parameters in float32, except during the steps of one optimizer.

    Works with any `torch.optim` optimizer, with closures and `GradScaler`, and with Accelerate's wrappers and its
    `clip_grad_norm_` and `accumulate`. Frozen and float32 parameters stay as they are.
    `fusedmlp.MainGradBuffer(params)` does the same with all gradients in one buffer.

    Args:
        model: its weights must have the dtype in which they are trained.
        optimizer: the one that steps the model's parameters, or Accelerate's wrapper of it.

    Raises:
        TypeError: the model is no module, the optimizer has no step hooks (DeepSpeed's), or parameters are DTensors.
        ValueError: the model is in DistributedDataParallel, which reduces gradients in the dtype of the parameters; or
            a parameter has a `main_grad`, in which gradients accumulate instead.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "model: expected one that is not in DistributedDataParallel, which reduces gradients in the dtype of "
                "the parameters; got one that is (FSDP2 accumulates in its reduce_dtype: see "
                "fusedmlp.integrations.fsdp2.accumulate_in)"
            )
        validate.module("model", model)
        self._params = _of_16_bits(model)
        _check_optimizer(optimizer)
        watch_steps()
        for param in self._params:
            state, grad = state_of(param), param.grad
            param.grad = None  # otherwise `grad_dtype` cannot change
            param.grad_dtype, state.accumulates_in, state.rounds = None, torch.float32, True
            param.grad = None if grad is None else grad.float()
            catch_plain_gradients(param, state)

    def remove(self) -> None:
        """Stop: give gradients the dtypes of their parameters again, and round the gradients that exist."""
        for param in self._params:
            state = state_of(param)
            restore(param, state)
            state.accumulates_in = None
            if state.memory is None:  # else `.grad` is that of a MainGradBuffer by now
                grad, param.grad = param.grad, None
                param.grad_dtype, state.rounds = param.dtype, False
                param.grad = None if grad is None else grad.to(param.dtype)


def _check_optimizer(optimizer: Optimizer) -> None:
    """Raise unless it is PyTorch's, or Accelerate's wrapper of one."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer; got {type(optimizer).__name__} ({deepspeed.OWN_DTYPE}; of "
            "another wrapper, pass the optimizer that it steps)"
        )


def _of_16_bits(model: nn.Module) -> list[nn.Parameter]:
    params = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if not is_plain(param):  # in float32, too: a shard that FSDP2 gathers in 16 bits
            raise TypeError(
                f"{name}: expected a plain tensor; got a {type(param).__name__} (FSDP2 accumulates in its "
                "reduce_dtype: use fusedmlp.integrations.fsdp2.accumulate_in instead)"
            )
        if param.dtype not in (torch.bfloat16, torch.float16):
            continue
        if getattr(param, "main_grad", None) is not None:
            raise ValueError(
                f"{name}: expected no main_grad; got one, in which its gradients accumulate already "
                "(MainGradBuffer(params) does what FP32Accumulation does: use one of them)"
            )
        params.append(param)
    return params
