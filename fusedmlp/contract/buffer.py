"""One flat tensor of memory for the gradients of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fusedmlp.contract import buffer_checks
from fusedmlp.contract.checks import check_flag
from fusedmlp.contract.memory import bring_home, lend, take_back
from fusedmlp.contract.parameter_state import ids_waiting, state_of

# Elements; 256 B in fp32, so that every view suits vector and bulk-copy instructions.
_ALIGNMENT = 64


class _NotPickled:
    """Attribute of a buffer's parameters that makes pickling them raise.

    PyTorch pickles a parameter's attributes. An unpickled parameter would have a `main_grad` of its own, which nothing
    reads. (`copy.deepcopy` of a `Parameter` drops attributes.)
    """

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "pickle: expected a parameter without main_grad; got one with the main_grad of a MainGradBuffer: call "
            "buffer.detach() first, or save the state_dict() instead"
        )


class MainGradBuffer:
    """Lends every parameter memory for its gradient: a view of one contiguous tensor, `param.main_grad`.

    `.grad` is None, or the gradient of this step, as everywhere in PyTorch: the first gradient to arrive is stored in
    that memory, later ones are added, of fused layers and of plain PyTorch. Loops, clipping, scalers and any number of
    optimizers work unchanged:

        buffer = fusedmlp.MainGradBuffer(model.parameters())
        for batch in data:
            optimizer.zero_grad()
            loss(model, batch).backward()       # as many micro-batches as you like
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    A `.grad` that is kept beyond `zero_grad()` is memory that the next step writes: keep a `.clone()`. Keep the buffer
    as long as the model trains.

    Args:
        params: leaf parameters on one device.
        dtype: of the memory: float32, or the parameters' own dtype.
        rounds_for_step: while a `torch.optim.Optimizer` steps, float32 gradients of 16-bit parameters are copies in the
            dtype of the parameters. False: for optimizers that take float32 gradients beside 16-bit parameters.

    Attributes:
        params: the parameters, in order.

    Raises:
        ValueError: no parameters, several devices, another dtype, a parameter given twice, or a parameter that is not a
            leaf or has a main_grad already.
        TypeError: a module, named parameters or a single parameter in place of parameters.
    """

    def __init__(
        self, params: Iterable[Tensor], *, dtype: torch.dtype = torch.float32, rounds_for_step: bool = True
    ) -> None:
        self.params = buffer_checks.listed(params)
        buffer_checks.check(self.params, dtype)
        check_flag("rounds_for_step", rounds_for_step)
        sizes = [-(-param.numel() // _ALIGNMENT) * _ALIGNMENT for param in self.params]
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=self.params[0].device)
        parts = zip(self.params, self._flat.split(sizes), strict=True)
        self._views: list[Tensor] = [part[: param.numel()].view(param.shape) for param, part in parts]
        self._states = [state_of(param) for param in self.params]
        self._nodes: list[Any] = []  # kept alive, with the hooks that are in them
        with torch.no_grad():
            for param, view, state in zip(self.params, self._views, self._states, strict=True):
                param.main_grad, param._main_grad_owner = view, _NotPickled()  # type: ignore[attr-defined]
                self._nodes.append(lend(param, state, view, rounds_for_step))

    def __repr__(self) -> str:
        """Size, and how many parameters have a gradient; reads nothing on the device."""
        elements, flat = sum(param.numel() for param in self.params), self._flat
        have = sum(param.grad is not None for param in self.params)
        return (
            f"MainGradBuffer({len(self.params)} parameters, {elements} elements, {flat.nbytes} bytes of {flat.dtype} "
            f"on {flat.device}, gradients of {have} parameters)"
        )

    @property
    @torch.no_grad()
    def flat(self) -> Tensor:
        """The 1-D memory with all gradients of this step; read it, or edit it in place.

        Leave padding between views zero. A `.grad` that is None becomes zeros, so that optimizers use edits.
        """
        if self._nodes:  # not detached
            self._gather("flat")
            for param, view in zip(self.params, self._views, strict=True):
                if param.grad is None and param.requires_grad:
                    param.grad = view
        return self._flat

    @flat.setter
    def flat(self, value: Tensor) -> None:
        if value is not self._flat:  # `buffer.flat /= 2` assigns the same tensor
            raise AttributeError("flat: expected to be written in place; got another tensor")

    def zero_grad(self) -> None:
        """Start a step: set every `.grad` to None, as `optimizer.zero_grad()` does. Moves no memory.

        Raises:
            RuntimeError: gradients of these parameters are still in a `WgradQueue`.
        """
        self._refuse_queued("zero_grad()")
        for param in self.params:
            param.grad = None

    def norm(self) -> Tensor:
        """Total 2-norm of all gradients, fp32, on the device."""
        self._gather("norm() and clip_norm_()")
        norm: Tensor = torch.linalg.vector_norm(self._flat, dtype=torch.float32)
        return norm

    @torch.no_grad()
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
    def _gather(self, what: str) -> None:
        """Bring every gradient home; fill the memory of those that are None with zeros."""
        self._refuse_queued(what)
        memory = self._flat.untyped_storage()._cdata
        for i, (param, view, state) in enumerate(zip(self.params, self._views, self._states, strict=True)):
            if view.untyped_storage()._cdata != memory or getattr(param, "main_grad", None) is not view:
                raise RuntimeError(
                    f"params[{i}]: expected the main_grad that this buffer gave it; got "
                    f"{'another' if hasattr(param, 'main_grad') else 'none'}, so that gradients go elsewhere (after "
                    "detach(), module.to() or another owner, make a new MainGradBuffer)"
                )
            if not bring_home(param, state):
                view.zero_()

    def _refuse_queued(self, what: str) -> None:
        queued = ids_waiting()
        for i, param in enumerate(self.params):
            if id(param) in queued:
                raise RuntimeError(
                    f"{what}: expected every gradient to be computed; got one of params[{i}] that is still in a "
                    "WgradQueue: call backward_dw(), or queue.run(), before (queue.clear() to discard the step)"
                )

    @torch.no_grad()
    def detach(self) -> None:
        """Take memory and attributes off the parameters; `.grad` stays, in memory of its own and the parameter's dtype,
        and `flat` stays.
        """
        self._nodes = []
        for param, view, state in zip(self.params, self._views, self._states, strict=True):
            if not bring_home(param, state):
                view.zero_()
            take_back(param, state)
            for name in ("main_grad", "_main_grad_owner"):
                if hasattr(param, name):
                    delattr(param, name)
