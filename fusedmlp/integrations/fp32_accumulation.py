"""Gradients of 16-bit parameters accumulated in float32, for optimizers that step from gradients of 16 bits.

    FP32Accumulation(model, optimizer)

From one step to the next `.grad` is float32: PyTorch casts what it adds, and with `accumulate_wgrad="grad"` the
weight-gradient GEMMs add to it themselves. Clipping sees it so, too. For the step it is rounded, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedmlp.contract.engine import is_plain


class FP32Accumulation:
    """Keeps `.grad` of a model's bf16 and fp16 parameters in float32, but for the steps of one optimizer.

    Works with any `torch.optim` optimizer, also through Accelerate's, whose `clip_grad_norm_` and `accumulate` it
    leaves as they are. Parameters that are frozen, or float32, stay as they are.

    Args:
        model: with its weights in the dtype that they are trained in.
        optimizer: of its parameters, also as `Accelerator.prepare` returns it.

    Raises:
        TypeError: the optimizer has no hooks of steps, or parameters are DTensors.
        ValueError: the model is in DistributedDataParallel, which reduces gradients in the dtype of the parameters; or
            a parameter has a `main_grad`, in which gradients accumulate instead.
        RuntimeError: from `step(closure)`, as the closure's gradients would be rounded one by one.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        while isinstance(getattr(optimizer, "optimizer", None), Optimizer):  # Accelerate's is around PyTorch's
            optimizer = optimizer.optimizer  # type: ignore[attr-defined]
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer; got {type(optimizer).__name__}")
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "model: expected one that is not in DistributedDataParallel, which reduces gradients in the dtype of "
                "the parameters; got one that is (see docs/ddp.md, or FSDP2 with reduce_dtype)"
            )
        self._params = _of_16_bits(model)
        self._exact: list[tuple[Tensor, Tensor]] = []  # inside a step, parameters and their float32 gradients
        for param in self._params:
            _set_grad(param, param.grad, torch.float32)
        self._hooks = (
            optimizer.register_step_pre_hook(self._round),
            optimizer.register_step_post_hook(self._restore),
        )

    def remove(self) -> None:
        """Gradients have the dtypes of the parameters again; those that are there are rounded."""
        for hook in self._hooks:
            hook.remove()
        for param in self._params:
            _set_grad(param, param.grad, param.dtype)

    def _round(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        if (args[1:] and args[1] is not None) or kwargs.get("closure") is not None:
            raise RuntimeError("step(): expected no closure, whose gradients would accumulate in 16 bits; got one")
        self._exact = [(param, param.grad) for param in self._params if param.grad is not None]
        for param, grad in self._exact:
            _set_grad(param, grad, param.dtype)

    def _restore(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Whoever goes on without `zero_grad()` adds to what was there."""
        for param, grad in self._exact:
            _set_grad(param, grad, torch.float32)
        self._exact = []


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


def _set_grad(param: Tensor, grad: Tensor | None, dtype: torch.dtype) -> None:
    param.grad = None  # or the dtype could not change
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype)
