"""Gradients of 16-bit parameters accumulated in float32, for optimizers that step from gradients of 16 bits.

    FP32Accumulation(model, optimizer)

From one step to the next `.grad` is float32: PyTorch casts what it adds, and with `accumulate_wgrad="grad"` the
weight-gradient GEMMs add to it themselves. Clipping sees it so, too. For the step it is rounded, once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedmlp.contract.engine import is_plain
from fusedmlp.contract.lending import StepHooks, set_grad
from fusedmlp.contract.parameter_state import state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients


class FP32Accumulation:
    """Keeps `.grad` of a model's bf16 and fp16 parameters in float32, but for the steps of one optimizer.

    Works with any `torch.optim` optimizer, its closures, and `GradScaler`, also through Accelerate's, whose
    `clip_grad_norm_` and `accumulate` it leaves as they are. Parameters that are frozen, or float32, stay as they are.
    `fusedmlp.MainGradBuffer(params, optimizer=optimizer)` does the same with all gradients in one buffer.

    Args:
        model: with its weights in the dtype that they are trained in.
        optimizer: of its parameters, also as `Accelerator.prepare` returns it.

    Raises:
        TypeError: the optimizer has no hooks of steps (DeepSpeed's), or parameters are DTensors.
        ValueError: the model is in DistributedDataParallel, which reduces gradients in the dtype of the parameters; or
            a parameter has a `main_grad`, in which gradients accumulate instead.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "model: expected one that is not in DistributedDataParallel, which reduces gradients in the dtype of "
                "the parameters; got one that is (see docs/ddp.md, or FSDP2 with reduce_dtype)"
            )
        self._params = _of_16_bits(model)
        self._hooks = StepHooks(optimizer, self._params)
        for param in self._params:
            set_grad(param, None if param.grad is None else param.grad.float(), torch.float32)
            catch_plain_gradients(param, state_of(param))  # after a step that raised

    def remove(self) -> None:
        """Gradients have the dtypes of the parameters again; those that are there are rounded."""
        self._hooks.remove()
        for param in self._params:
            set_grad(param, None if param.grad is None else param.grad.to(param.dtype), param.dtype)


def _of_16_bits(model: nn.Module) -> list[nn.Parameter]:
    found = []
    for name, param in model.named_parameters():
        if not param.requires_grad or param.dtype not in (torch.bfloat16, torch.float16):
            continue
        if not is_plain(param):
            raise TypeError(
                f"{name}: expected a plain tensor; got a {type(param).__name__} (FSDP2 accumulates in its "
                "reduce_dtype: see fusedmlp.integrations.fsdp2.accumulate_in)"
            )
        if getattr(param, "main_grad", None) is not None:
            raise ValueError(f"{name}: expected no main_grad; got one, in which its gradients accumulate")
        found.append(param)
    return found
