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
from fusedmlp.contract.lending import StepHooks, accumulate_in
from fusedmlp.contract.parameter_state import state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients


class FP32Accumulation:
    """Keep `.grad` of a model's bf16 and fp16 parameters in float32, except during the steps of one optimizer.

    Works with any `torch.optim` optimizer, with closures and `GradScaler`, and with Accelerate's wrappers and its
    `clip_grad_norm_` and `accumulate`. Frozen and float32 parameters stay as they are.
    `fusedmlp.MainGradBuffer(params, optimizer=optimizer)` does the same with all gradients in one buffer.

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
        self._hooks = StepHooks(optimizer, self._params)
        for param in self._params:
            state = state_of(param)
            accumulate_in(param, state, torch.float32, None if param.grad is None else param.grad.float())
            catch_plain_gradients(param, state)

    def remove(self) -> None:
        """Stop: give gradients the dtypes of their parameters again, and round the gradients that exist."""
        self._hooks.remove()
        for param in self._params:
            state = state_of(param)
            if not state.grad_is_main:  # else `.grad` is that of a MainGradBuffer by now
                accumulate_in(param, state, None, None if param.grad is None else param.grad.to(param.dtype))


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
                "(MainGradBuffer(params, optimizer=optimizer) does what FP32Accumulation does: use one of them)"
            )
        params.append(param)
    return params
