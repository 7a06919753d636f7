"""One flat gradient buffer for models that are not trained by Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedmlp.contract import buffer_checks, buffer_summary
from fusedmlp.contract.checks import grad_dtype
from fusedmlp.contract.dummy import has_dummy_wgrad, remove_dummy_wgrad
from fusedmlp.contract.guard import guard_optimizers
from fusedmlp.contract.lending import StepHooks, accumulate_in, check_optimizer, lend, reclaim, was_edited
from fusedmlp.contract.overwrite import begin_step, is_stale, mark_stale, refuse_queued
from fusedmlp.contract.parameter_state import ParameterState, state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients
from fusedmlp.contract.states import STALE, ZEROS, Event
from fusedmlp.flags import check_flag

# Elements; 256 B in fp32, so that every view suits vector and bulk-copy instructions.
_ALIGNMENT = 64


class _NotPickled:
    """Attribute of a buffer's parameters that makes pickling them raise.

    PyTorch pickles a parameter's attributes. An unpickled parameter would have a `main_grad` that takes every gradient
    but from which no optimizer steps. (`copy.deepcopy` of a `Parameter` drops attributes.)
    """

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "pickle: expected a parameter without main_grad; got one with the main_grad of a MainGradBuffer: call "
            "buffer.detach() first, or save the state_dict() instead"
        )


class MainGradBuffer:
    """Gives every parameter a `main_grad`: a view of one contiguous buffer.

    With an optimizer, `.grad` is `main_grad`, float32 also where weights are not, and the usual loop is right as it is:

        buffer = fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
        for batch in data:
            optimizer.zero_grad()
            loss(model, batch).backward()       # as many micro-batches as you like
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    Without one, a loop steps from the buffer itself:

        buffer = fusedmlp.MainGradBuffer(model.parameters())
        for batch in data:
            buffer.zero_()
            loss(model, batch).backward()
            with buffer.as_grad():
                optimizer.step()

    In both loops, starting a step moves no memory: `main_grad` becomes stale, and the first gradient to arrive, from a
    fused layer or from plain PyTorch, overwrites it. Until then, methods and `flat` show zeros; `param.main_grad`
    itself still has the old values.

    Args:
        params: leaf parameters on one device. Parameters that no fused layer uses get their gradients from autograd.
        optimizer: a `torch.optim.Optimizer` of these parameters (or Accelerate's wrapper of one). For its steps,
            gradients of 16-bit weights are rounded to the dtype of the weights.
        dtype: of the buffer: float32, or the parameters' own dtype.
        grad_added_to_main_grad: without an optimizer, also give every parameter the attribute
            `grad_added_to_main_grad = False`. A fused backward then sets it to True and leaves a zero gradient in
            `.grad`, as Megatron's optimizers expect. See `fusedmlp.contract`.

    Attributes:
        params: the parameters, in order.

    Raises:
        ValueError: no parameters, several devices, another dtype, a parameter given twice, or a parameter that is not a
            leaf, has a main_grad already, or is not in the optimizer.
        TypeError: a module, named parameters or a single parameter in place of parameters; or the optimizer is not one
            of `torch.optim`.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        optimizer: Optimizer | None = None,
        dtype: torch.dtype = torch.float32,
        grad_added_to_main_grad: bool = True,
    ) -> None:
        self.params = buffer_checks.listed(params)
        self._lent = False  # True inside as_grad
        self._with_optimizer = optimizer is not None
        buffer_checks.check(self.params, dtype)
        check_flag("grad_added_to_main_grad", grad_added_to_main_grad)
        if optimizer is not None:
            check_optimizer(optimizer, self.params)
        sizes = [-(-param.numel() // _ALIGNMENT) * _ALIGNMENT for param in self.params]
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=self.params[0].device)
        parts = zip(self.params, self._flat.split(sizes), strict=True)
        self._views = [part[: param.numel()].view(param.shape) for param, part in parts]
        self._states = [state_of(param) for param in self.params]
        guard_optimizers()
        for param, view, state in self._each():
            extended: Any = param
            extended.main_grad, extended._main_grad_owner = view, _NotPickled()
            state.buffer = self._states
            state.on(Event.ATTACH)
            if optimizer is None and grad_added_to_main_grad:
                extended.grad_added_to_main_grad = False
        self._hooks = None if optimizer is None else self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> StepHooks:
        """Make `main_grad` the `.grad` of every parameter; round it for steps of the optimizer where dtypes differ."""
        for param, view, state in self._each():
            state.grad_is_main, grad = True, param.grad
            accumulate_in(param, state, view.dtype, grad)
            if grad is not None:
                reclaim(param, state)
                state.on(Event.CATCH)
            catch_plain_gradients(param, state)
        return StepHooks(optimizer, self.params)

    def __repr__(self) -> str:
        """Size, the share of elements in parameters that fused layers use, and the state of the step."""
        step = "inside as_grad()" if self._lent else buffer_summary.step(self.params, self._states)
        return f"MainGradBuffer({buffer_summary.size(self.params, self._states, self._flat)}, {step})"

    def _each(self) -> Iterator[tuple[Tensor, Tensor, ParameterState]]:
        return zip(self.params, self._views, self._states, strict=True)

    @property
    @torch.no_grad()
    def flat(self) -> Tensor:
        """The 1-D buffer with all gradients of this step; read it, or edit it in place.

        Leave padding between views zero. With an optimizer, reading `flat` gives every parameter that requires grad a
        `.grad`, of zeros where no gradient has arrived, so that the optimizer uses edits.
        """
        if not self._lent:
            if self._states[0].buffer is self._states:  # not detached
                self._refuse_replaced()
            self._gather()
            for param, view, state in self._each():
                if state.grad_is_main and param.requires_grad and param.grad is None:
                    param.grad = view
        return self._flat

    @flat.setter
    def flat(self, value: Tensor) -> None:
        if value is not self._flat:  # `buffer.flat /= 2` assigns the same tensor
            raise AttributeError("flat: expected to be written in place; got another tensor")

    def zero_(self) -> None:
        """Start a step: mark all gradients stale, set every `.grad` to None, every `grad_added_to_main_grad` to False.

        Moves no memory: the first gradient of each parameter overwrites.
        """
        self._refuse_now("zero_()")
        begin_step(self._states)

    def norm(self) -> Tensor:
        """Total 2-norm of all gradients, fp32, on the device; gradients in `.grad` are moved into the buffer first."""
        self._absorb("norm() and clip_norm_()")
        norm: Tensor = torch.linalg.vector_norm(self._flat, dtype=torch.float32)
        return norm

    def clip_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that `norm()` is at most `max_norm`; return the norm before that, on the device.

        Args:
            max_norm: at least 0.
            error_if_nonfinite: raise RuntimeError, before scaling, if the norm is not finite; waits for the device.
        """
        buffer_checks.check_max_norm(max_norm)
        check_flag("error_if_nonfinite", error_if_nonfinite)
        norm = self.norm()
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"clip_norm_: expected a finite norm of the gradients; got {norm.item()}")
        # Not `_flat`, whose padding a NaN would turn into NaN for all later steps.
        torch._foreach_mul_(self._views, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def _absorb(self, what: str) -> None:
        """Move into `main_grad` what autograd left in `.grad`, so that norms and steps see all of the gradient."""
        self._refuse_now(what)
        self._gather()

    def _gather(self) -> None:
        for param, view, state in self._each():
            if param.grad is not None and not has_dummy_wgrad(param):
                if state.grad_is_main:
                    reclaim(param, state)
                    if state.holds is STALE:
                        state.on(Event.CATCH)
                    continue
                view.copy_(param.grad) if state.holds is STALE else view.add_(param.grad)
                param.grad = None
                state.on(Event.CATCH)
        for param, view, state in self._each():
            if is_stale(param, state):
                view.zero_()
                state.on(Event.READ)

    @contextmanager
    def as_grad(self) -> Iterator[None]:
        """Context in which `.grad` of every parameter is its `main_grad` (a copy, if `.grad` needs another dtype).

        On entry, gradients that autograd left in `.grad` (of layers that do not fuse) are added to `main_grad`. On
        exit, `.grad` is None again, so that nothing is counted twice, and `main_grad` keeps every change made inside:
        by `clip_grad_norm_`, `unscale_`, `zero_grad()`, a new tensor in `.grad`, or a backward in a closure.

        A parameter without a gradient in this step has zeros, by which an optimizer with weight decay or momentum
        still steps: leave such parameters out of the buffer. A parameter that has been frozen has a `.grad` only if it
        got a gradient in this step. With `MainGradBuffer(..., optimizer=...)`, `.grad` is `main_grad` anyway.

        Raises:
            RuntimeError: gradients of these parameters are still in a `WgradQueue`. Inside the context, `zero_()`,
                `norm()`, `clip_norm_()` and `as_grad()` raise, as does a fused backward if `.grad` is a copy.
        """
        self._absorb("as_grad()")
        if self._with_optimizer:
            yield
            return
        self._lent, lent = True, []
        try:
            with torch.no_grad():
                for param, view, state in self._each():
                    param.grad = None  # it may be a dummy
                    if param.requires_grad or state.holds not in (STALE, ZEROS):
                        state.grad_is_main = grad_dtype(param) == view.dtype
                        if state.grad_is_main:
                            param.grad = view
                        else:
                            lend(param, state, view, takes_gradients=False)
                        lent.append((param, view, state))
            yield
        finally:
            self._lent = False
            with ExitStack() as stack:  # runs every callback, even if one fails
                for each in lent:
                    stack.callback(_take_back, *each)

    def _refuse_now(self, what: str) -> None:
        """Raise if `main_grad` is not this step's gradient: inside as_grad, with gradients in a queue, or replaced."""
        if self._lent:
            raise RuntimeError(
                f"{what}: expected a call outside of as_grad(); got one inside, where .grad is main_grad itself"
            )
        refuse_queued(self._states, what)
        self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        memory = self._flat.untyped_storage()._cdata
        for i, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if view.untyped_storage()._cdata != memory or getattr(param, "main_grad", None) is not view:
                raise RuntimeError(
                    f"params[{i}]: expected the main_grad that this buffer gave it; got "
                    f"{'another' if hasattr(param, 'main_grad') else 'none'}, so that gradients go elsewhere (after "
                    "detach(), module.to() or another owner, make a new MainGradBuffer)"
                )

    def detach(self) -> None:
        """Remove `main_grad`, `grad_added_to_main_grad` and dummies from the parameters; `flat` stays.

        With an optimizer, `.grad` stays too, rounded to the dtype of its parameter.
        """
        for param, view, state in self._each():
            if is_stale(param, state):
                view.zero_()
        if self._hooks is not None:
            self._hooks.remove()
        for param, _, state in self._each():
            remove_dummy_wgrad(param)
            if state.grad_is_main:
                accumulate_in(param, state, None, None if param.grad is None else param.grad.to(param.dtype))
            state.grad_is_main, state.buffer = False, None
            state.on(Event.DETACH)
            for name in ("main_grad", "grad_added_to_main_grad", "_main_grad_owner"):
                if hasattr(param, name):
                    delattr(param, name)


@torch.no_grad()
def _take_back(param: Tensor, main_grad: Tensor, state: ParameterState) -> None:
    """When `as_grad` ends: copy an edited `.grad` back to `main_grad`, or mark that stale if `.grad` was cleared."""
    grad, lent = param.grad, state.lent
    state.grad_is_main, state.lent, param.grad = False, None, None
    if grad is None:
        mark_stale(param, state)
    else:
        if grad is not main_grad and was_edited(lent, grad):
            main_grad.copy_(grad)
        if state.holds is ZEROS:
            state.on(Event.RETURN)
