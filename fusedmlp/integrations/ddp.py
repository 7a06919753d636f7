"""PyTorch's `DistributedDataParallel`: weight gradients that are added straight into its buckets.

DDP reduces flat buckets. With `gradient_as_bucket_view=True`, each `.grad` becomes a view of its bucket, and with
`accumulate_wgrad="auto"` or "grad" the GEMM then adds into what is reduced: nothing is allocated or copied. Two things
stand in the way, and `grads_in_buckets` removes both. DDP makes the views only when it first reduces a gradient, so
that the first step holds every weight gradient twice. And `zero_grad()` lets go of them: the next gradient is a fresh
tensor again, which DDP copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary


def grads_in_buckets(
    module: nn.Module,
    parameters: Iterable[nn.Parameter],
    wrap: Callable[[nn.Module], DistributedDataParallel],
) -> DistributedDataParallel:
    """Wrap a module in DDP so that the `.grad` of some of its parameters is never anything but a view of a bucket.

        ddp = grads_in_buckets(
            model,
            model.experts.parameters(),
            lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
        )

    From then on these parameters behave as under `zero_grad(set_to_none=False)`, whichever way they are zeroed: one
    without a gradient in a step has a zero one, not None. Every result is the same without this function; it saves
    memory and copies.

    Args:
        module: what is to be wrapped.
        parameters: those that layers with `accumulate_wgrad="auto"` or "grad" use; those that are frozen are left out.
        wrap: makes the DDP from the module, with `gradient_as_bucket_view=True`.

    Returns:
        What `wrap` returned.

    Raises:
        ValueError: `wrap` left a `.grad` that is no view of a bucket.
    """
    hook = _KeepGrads([param for param in parameters if param.requires_grad])
    before = []
    for param in hook.params:
        if param.grad is None:  # DDP copies a gradient that it finds into its bucket; this one takes no memory
            param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        before.append(param.grad)
    try:
        ddp = wrap(module)
        for param, grad in zip(hook.params, before, strict=True):
            if param.grad is grad:
                raise ValueError(
                    "wrap: expected DistributedDataParallel(..., gradient_as_bucket_view=True) over all parameters; "
                    f"got {type(ddp).__name__} that does not reduce one of shape {tuple(param.shape)} in place"
                )
    except BaseException:
        for param in hook.params:
            param.grad = None
        raise
    hook()
    ddp.register_forward_pre_hook(hook)
    module.register_forward_pre_hook(hook)
    return ddp


_views = WeakTensorKeyDictionary()  # parameter -> its view of a bucket


class _KeepGrads:
    """Gives parameters whose `.grad` is None their views back, zeroed, and takes note of the others'.

    A forward pre-hook of DDP and of the module inside: between the two, DDP makes new buckets once, copies the
    gradients that it finds, and lets `.grad` be views of those.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    def __call__(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for param in self.params:
            if param.grad is not None:
                _views[param] = param.grad
            elif param in _views:  # a copy of the module has none
                param.grad = _views[param].zero_()
