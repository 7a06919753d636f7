"""PyTorch's `DistributedDataParallel`: add weight gradients straight into its buckets.

DDP reduces flat buckets. With `gradient_as_bucket_view=True`, each `.grad` becomes a view of its bucket, and with
`accumulate_wgrad="auto"` or "grad" the GEMM then adds into what is reduced: nothing is allocated or copied. Two things
stand in the way, and `grads_in_buckets` removes both. DDP makes the views only when it first reduces a gradient, so
that the first step holds every weight gradient twice. And `zero_grad()` drops the views: the next gradient is a new
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
    """Wrap a module in DDP so that the `.grad` of some of its parameters is a view of a bucket from the first step on.

        ddp = grads_in_buckets(
            model,
            model.experts.parameters(),
            lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
        )

    However these parameters are zeroed, they then behave as after `zero_grad(set_to_none=False)`: a parameter that a
    step does not use has a zero gradient, not None. Gradients are the same without this function; it saves memory and
    copies.

    Args:
        module: the module to wrap.
        parameters: weights of layers with `accumulate_wgrad="auto"` or "grad"; frozen ones are skipped.
        wrap: makes the DDP from the module, with `gradient_as_bucket_view=True`.

    Returns:
        The DDP that `wrap` made.

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
    """Forward pre-hook: sets a `.grad` that is None to its view, zeroed, and remembers every other `.grad` as a view.

    Runs for DDP and again for the module inside: between the two, DDP makes new buckets once, copies the gradients
    that it finds into them, and makes `.grad` views of the new buckets.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    def __call__(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for param in self.params:
            if param.grad is not None:
                _views[param] = param.grad
            elif param in _views:  # parameters of a copied module have no view
                param.grad = _views[param].zero_()
