"""One flat gradient buffer for models that are not trained by Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedmlp.contract.destination import grad_dtype
from fusedmlp.contract.dummy import has_dummy_wgrad, remove_dummy_wgrad
from fusedmlp.contract.engine import is_plain
from fusedmlp.contract.guard import guard_optimizers
from fusedmlp.contract.lending import StepHooks, check_optimizer, lend, reclaim, set_grad, was_edited
from fusedmlp.contract.overwrite import begin_step, is_stale, mark_stale, refuse_queued
from fusedmlp.contract.parameter_state import GRADIENT, LENT, STALE, ZEROS, ParameterState, state_of
from fusedmlp.contract.plain_gradient import catch_plain_gradients

# Elements; 256 B in fp32, so that every view suits vector and bulk-copy instructions.
_ALIGNMENT = 64


class _NotPickled:
    """An attribute of the parameters of a buffer; it keeps them out of pickles.

    PyTorch pickles a parameter's attributes. What unpickles has a `main_grad` that no optimizer steps from, and every
    gradient would go there. (`copy.deepcopy` of a `Parameter` leaves attributes behind.)
    """

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "a parameter with a main_grad of MainGradBuffer: expected it without to be pickled; call buffer.detach() "
            "first, or save the state_dict() instead"
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

    In either, a new step costs nothing: what `main_grad` holds is stale then, and the first gradient to come, of a
    fused layer or of plain PyTorch, overwrites it. Methods and `flat` show zeros where none has come; `param.main_grad`
    itself shows what was there before.

    Args:
        params: leaf parameters on one device. Those that no fused layer uses get their gradients from autograd.
        optimizer: a `torch.optim.Optimizer` of these parameters (or Accelerate's wrapper of one). For its steps,
            gradients of 16-bit weights are rounded to the dtype of the weights.
        dtype: of the buffer: float32, or the parameters' own dtype.
        grad_added_to_main_grad: without an optimizer, also give parameters that attribute (False). A fused backward
            then sets it and leaves a zero gradient in `.grad`, as Megatron's optimizers expect. See
            `fusedmlp.contract`.

    Attributes:
        params: the parameters, in order.

    Raises:
        ValueError: no parameters, several devices, a parameter given twice, a non-leaf, or one that has a main_grad, or
            one that the optimizer lacks.
        TypeError: the optimizer is not one of `torch.optim`.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        optimizer: Optimizer | None = None,
        dtype: torch.dtype = torch.float32,
        grad_added_to_main_grad: bool = True,
    ) -> None:
        self.params = list(params)
        self._lent = False  # inside as_grad
        self._with_optimizer = optimizer is not None
        self._check(dtype)
        if optimizer is not None:
            check_optimizer(optimizer, self.params)
        sizes = [-(-param.numel() // _ALIGNMENT) * _ALIGNMENT for param in self.params]
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=self.params[0].device)
        parts = zip(self.params, self._flat.split(sizes), strict=True)
        self._views = [part[: param.numel()].view(param.shape) for param, part in parts]
        self._states = [state_of(param) for param in self.params]
        self._hooks: StepHooks | None = None
        guard_optimizers()
        for param, view, state in self._each():
            extended: Any = param
            extended.main_grad, extended._main_grad_owner = view, _NotPickled()
            state.buffer, state.holds = self._states, ZEROS
            if optimizer is None and grad_added_to_main_grad:
                extended.grad_added_to_main_grad = False
        if optimizer is not None:
            self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> None:
        """Let `.grad` be `main_grad`."""
        for param, view, state in self._each():
            state.grad_is_main = True
            if param.grad is None:
                set_grad(param, None, view.dtype)
            else:
                reclaim(param, state)
                state.holds = GRADIENT
            catch_plain_gradients(param, state)
        rounded = [param for param, view, _ in self._each() if param.dtype != view.dtype]
        if rounded:
            self._hooks = StepHooks(optimizer, rounded)

    def _check(self, dtype: torch.dtype) -> None:
        if not self.params:
            raise ValueError("params: expected at least one parameter; got none")
        if len({id(param) for param in self.params}) < len(self.params):
            raise ValueError("params: expected each parameter once; got one twice")
        for i, param in enumerate(self.params):
            if not param.is_leaf or not param.requires_grad:
                raise ValueError(f"params[{i}]: expected a leaf that requires grad; got {param.grad_fn or param}")
            if not is_plain(param):
                raise ValueError(
                    f"params[{i}]: expected a plain tensor; got a {type(param).__name__} (FSDP2 reduces .grad: step "
                    "from that, with accumulate_wgrad='grad' and fusedmlp.integrations.fsdp2.accumulate_in)"
                )
            if param.device != self.params[0].device:
                raise ValueError(f"params[{i}]: expected device {self.params[0].device}; got {param.device}")
            if dtype not in (torch.float32, param.dtype):
                raise ValueError(f"dtype: expected torch.float32 or params[{i}]'s {param.dtype}; got {dtype}")
            if getattr(param, "main_grad", None) is not None:
                raise ValueError(f"params[{i}]: expected no main_grad yet; got one from another owner")

    def _each(self) -> Iterator[tuple[Tensor, Tensor, ParameterState]]:
        return zip(self.params, self._views, self._states, strict=True)

    @property
    @torch.no_grad()
    def flat(self) -> Tensor:
        """The buffer, 1-D, with all gradients of this step in it, to be read and edited in place.

        Between views there may be padding: leave it zero. With an optimizer, every parameter that requires a gradient
        has one from then on, if only of zeros, so that edits count.
        """
        if not self._lent:
            self._gather()
            for param, view, state in self._each():
                if state.grad_is_main and param.requires_grad and param.grad is None:
                    set_grad(param, view, view.dtype)
        return self._flat

    @flat.setter
    def flat(self, value: Tensor) -> None:
        if value is not self._flat:  # `buffer.flat /= 2` assigns the same tensor
            raise AttributeError("flat: expected to be written in place; got another tensor")

    def zero_(self) -> None:
        """Start a step: all gradients are stale, every `.grad` is None, every `grad_added_to_main_grad` False.

        Moves no memory: the first gradient of each parameter overwrites.
        """
        self._refuse_now("zero_()")
        begin_step(self._states)

    def norm(self) -> Tensor:
        """Total 2-norm of all gradients, fp32, on the device; what is in `.grad` is moved into the buffer first."""
        self._absorb("norm() and clip_norm_()")
        norm: Tensor = torch.linalg.vector_norm(self._flat, dtype=torch.float32)
        return norm

    def clip_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that `norm()` is at most `max_norm`; the norm before, on the device."""
        norm = self.norm()
        self._flat.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
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
                    state.holds = GRADIENT if state.holds is STALE else state.holds
                    continue
                view.copy_(param.grad) if state.holds is STALE else view.add_(param.grad)
                param.grad, state.holds = None, GRADIENT
        for param, view, state in self._each():
            if is_stale(param, state):
                view.zero_()
                state.holds = ZEROS

    @contextmanager
    def as_grad(self) -> Iterator[None]:
        """Inside, `.grad` of every parameter is its `main_grad` (a copy, if `.grad` needs another dtype).

        What autograd itself left in `.grad` (a layer that does not fuse) is added to `main_grad` first. Outside,
        `.grad` is None again, so that nothing is counted twice; `main_grad` keeps what was done to it inside by
        `clip_grad_norm_`, `unscale_`, a new tensor in `.grad`, `zero_grad()`, or a backward, as closures run it.
        A parameter without any gradient has a zero one, which an optimizer with weight decay or momentum still steps
        by; leave such parameters out of the buffer. One that was frozen since, and got no gradient in this step, has
        none. With `MainGradBuffer(..., optimizer=...)`, `.grad` is `main_grad` anyway.

        Raises:
            RuntimeError: inside, from `zero_()`, `norm()`, `clip_norm_()` and `as_grad()`, and from a fused backward if
                `.grad` is a copy. Or gradients of these parameters are still in a `WgradQueue`.
        """
        self._absorb("as_grad()")
        if self._with_optimizer:
            yield
            return
        self._lent, lent = True, []
        try:
            with torch.no_grad():
                for param, view, state in self._each():
                    param.grad = None  # a dummy
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
            with ExitStack() as stack:  # each, even if one fails
                for each in lent:
                    stack.callback(_take_back, *each)

    def _refuse_now(self, what: str) -> None:
        """Raise where `main_grad` is not the gradient of this step: it is lent, incomplete, or not ours any more."""
        if self._lent:
            raise RuntimeError(
                f"{what}: expected outside of as_grad(), inside which .grad is main_grad itself; got it inside"
            )
        refuse_queued(self._states, what)
        memory = self._flat.untyped_storage()._cdata
        for i, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if view.untyped_storage()._cdata != memory or getattr(param, "main_grad", None) is not view:
                raise RuntimeError(
                    f"params[{i}]: expected the main_grad that this buffer gave it; got "
                    f"{'another' if hasattr(param, 'main_grad') else 'none'}, so that gradients go elsewhere (after "
                    "detach(), module.to() or another owner, make a new MainGradBuffer)"
                )

    def detach(self) -> None:
        """Take `main_grad`, `grad_added_to_main_grad` and dummies off the parameters again; `flat` stays.

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
                set_grad(param, None if param.grad is None else param.grad.to(param.dtype), param.dtype)
            state.grad_is_main, state.buffer, state.holds = False, None, GRADIENT
            for name in ("main_grad", "grad_added_to_main_grad", "_main_grad_owner"):
                if hasattr(param, name):
                    delattr(param, name)


@torch.no_grad()
def _take_back(param: Tensor, main_grad: Tensor, state: ParameterState) -> None:
    """When `as_grad` ends: let `main_grad` be what became of `.grad`."""
    grad, lent = param.grad, state.lent
    state.grad_is_main, state.lent, param.grad = False, None, None
    if grad is None:
        mark_stale(param, state)
    else:
        if grad is not main_grad and was_edited(lent, grad):
            main_grad.copy_(grad)
        if state.holds is ZEROS:
            state.holds = LENT
