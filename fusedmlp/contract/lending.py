"""Lends optimizers, for a step, a copy of a float32 `.grad` that is rounded to the dtype of its 16-bit parameter.

Gradients of 16-bit weights accumulate in float32: `param.grad_dtype` None permits a `.grad` of any dtype, the catch
(`plain_gradient.py`) makes PyTorch add to a float32 tensor, and a weight-gradient GEMM adds unrounded. Optimizers need
gradients in the parameter's dtype, so during a step `.grad` is a rounded copy (`lend`), and afterwards the exact tensor
again (`reclaim`). An edited copy is copied back; if `.grad` was set to None, the exact gradient is dropped. If a step
raises, the next gradient or step reclaims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedmlp.contract.owners import deepspeed, fsdp1
from fusedmlp.contract.parameter_state import Lent, ParameterState, state_of


def accumulate_in(param: Tensor, state: ParameterState, dtype: torch.dtype | None, grad: Tensor | None) -> None:
    """Set `.grad` to `grad`, and the dtype in which later gradients are added up; None: the parameter's own, as before.

    `.grad` may then have any dtype: checkpoints and loops put `torch.zeros_like(param)` there.
    """
    param.grad = None  # otherwise `grad_dtype` cannot change
    param.grad_dtype = param.dtype if dtype is None else None
    state.accumulates_in = dtype
    param.grad = grad


def lend(param: Tensor, state: ParameterState, exact: Tensor, *, takes_gradients: bool) -> Tensor:
    """Set `.grad` to a copy of `exact` in the dtype of the parameter, and return the copy."""
    with torch.inference_mode(False):  # a step may run in inference_mode, but the copy has a version
        rounded = exact.to(param.dtype)
    param.grad = rounded
    state.lent = Lent(rounded, rounded._version, exact, takes_gradients)
    return rounded


def reclaim(param: Tensor, state: ParameterState) -> bool:
    """Put the exact tensor back into `.grad`, before a gradient is added to it. A tensor of another dtype that somebody
    has put there becomes one of the dtype in which gradients accumulate.

    Returns True if `.grad` had been set to None. What the exact tensor holds is then of an earlier step. It becomes
    `.grad` again if it is `main_grad`; otherwise `.grad` stays None.

    Raises:
        RuntimeError: inside `as_grad`, where `.grad` is a copy to which no gradient can be added unrounded.
    """
    lent, grad = state.lent, param.grad
    if lent is not None and not lent.takes_gradients:
        raise RuntimeError(
            f"a backward inside as_grad(): expected weights in the dtype of main_grad; got {param.dtype} weights, and "
            "a rounded copy in .grad (for closures of optimizers use MainGradBuffer(params, optimizer=optimizer))"
        )
    main_grad: Tensor | None = getattr(param, "main_grad", None)
    exact = main_grad if state.grad_is_main else lent.exact if lent is not None else grad
    if exact is None or (grad is exact and lent is None):
        if grad is not None and state.accumulates_in not in (None, grad.dtype):
            param.grad = grad.to(state.accumulates_in)
        return False
    if grad is not None and was_edited(lent, grad):
        exact.copy_(grad.detach())
    state.lent = None
    param.grad = None if grad is None and not state.grad_is_main else exact
    return grad is None


def was_edited(lent: Lent | None, grad: Tensor) -> bool:
    """Whether `.grad` has been replaced or written to since it was lent."""
    return lent is None or grad is not lent.rounded or grad._version != lent.version


class StepHooks:
    """Hooks of an optimizer that lend it rounded gradients for its steps, and reclaim them while a closure runs.

    Args:
        optimizer: a `torch.optim.Optimizer`, or Accelerate's wrapper of one.
        params: leaf parameters; those whose `.grad` has another dtype at a step are lent one.

    Raises:
        TypeError: the optimizer has no hooks.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        self.optimizer = unwrap(optimizer)
        self._params = [(param, state_of(param)) for param in params]
        inner = (value for value in vars(self.optimizer).values() if isinstance(value, Optimizer))  # SAM steps another
        # Outside of graphs: Dynamo cannot trace a `.grad` of another dtype.
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        self._hooks = [
            hook
            for each in (self.optimizer, *inner)
            for hook in (each.register_step_pre_hook(before), each.register_step_post_hook(after))
        ]

    def remove(self) -> None:
        """Reclaim lent gradients and remove the hooks."""
        self._reclaim()
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _lend(self) -> None:
        self._reclaim()  # after a step that raised
        differing = [
            (param, state, grad)
            for param, state in self._params
            if (grad := param.grad) is not None and grad.dtype != param.dtype
        ]
        if not differing:
            return
        self._fit([grad for param, _, grad in differing if param.dtype == torch.float16])
        copies = [lend(param, state, grad, takes_gradients=True) for param, state, grad in differing]
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None:  # rounding to float16 may have overflowed
            found_inf.copy_(torch.maximum(found_inf, (~_largest(copies).isfinite()).to(found_inf)))

    def _fit(self, rounded: list[Tensor]) -> None:
        """Scale down gradients that a `GradScaler` leaves to fused optimizers until the largest one fits float16.

        They are not unscaled, as small ones would then be zero in float16. `rounded`: those that will be float16.
        """
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is None or not rounded:
            return
        largest = _largest(rounded).to(scale)
        factor = (torch.finfo(torch.float16).max / largest).log2().floor().exp2().clamp(max=1)  # 1 if all are zero
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(factor.to(param.grad.device))
        self.optimizer.grad_scale = scale * factor  # type: ignore[attr-defined]

    @torch.no_grad()
    def _reclaim(self) -> None:
        for param, state in self._params:
            if state.lent is not None and reclaim(param, state):
                param.grad = None

    def _before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._lend()
        return wrap_closure(args, kwargs, self._around)

    def _around(self, closure: Callable[[], Any]) -> Any:
        self._reclaim()
        result = closure()
        self._lend()
        return result

    def _after(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._reclaim()


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute value in tensors on one or more devices; NaN if there is one."""
    norms = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()] or [torch.zeros(1)], math.inf)
    return torch.stack([norm.float().to(norms[0].device) for norm in norms]).amax()


def unwrap(optimizer: Optimizer) -> Optimizer:
    """PyTorch's optimizer inside Accelerate's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer; got {type(optimizer).__name__} ({deepspeed.OWN_DTYPE}; of "
            "another wrapper, pass the optimizer that it steps)"
        )
    return optimizer


def check_optimizer(optimizer: Optimizer, params: list[Tensor]) -> None:
    """Raise if a parameter is not in the optimizer, or if its `.grad` has another size."""
    known = {id(param) for group in unwrap(optimizer).param_groups for param in group["params"]}
    for i, param in enumerate(params):
        if fsdp1.is_flat(param):
            raise ValueError(f"params[{i}]: expected a parameter that is whole; got {fsdp1.FLAT}")
        if id(param) not in known:
            raise ValueError(
                f"params[{i}]: expected a parameter of the optimizer; got one that none of its groups has, of shape "
                f"{tuple(param.shape)} ({deepspeed.OWN_COPIES})"
            )


def wrap_closure(
    args: Any, kwargs: dict[str, Any], run: Callable[[Callable[[], Any]], Any]
) -> tuple[Any, dict[str, Any]]:
    """The arguments of `optimizer.step`, with the closure, if there is one, replaced by a call of `run(closure)`."""
    if len(args) > 1 and callable(args[1]):
        closure = args[1]
        return (args[0], lambda: run(closure), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        closure = kwargs["closure"]
        return args, kwargs | {"closure": lambda: run(closure)}
    return args, kwargs
