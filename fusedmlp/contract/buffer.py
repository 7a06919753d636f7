"""One flat gradient buffer for models that are not trained by Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from fusedmlp.contract.destination import grad_dtype
from fusedmlp.contract.dummy import has_dummy_wgrad, remove_dummy_wgrad
from fusedmlp.contract.engine import is_plain
from fusedmlp.contract.overwrite import forget_overwrite
from fusedmlp.contract.parameter_state import find_state

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

    A plain PyTorch loop steps from it like this:

        buffer = fusedmlp.MainGradBuffer(model.parameters())
        for batch in data:
            buffer.zero_()
            loss(model, batch).backward()       # as many micro-batches as you like
            with buffer.as_grad():
                optimizer.step()

    Args:
        params: leaf parameters on one device. Those that no fused layer uses keep their `.grad` as usual.
        dtype: of the buffer: float32, or the parameters' own dtype.
        grad_added_to_main_grad: also give parameters that attribute (False). A fused backward then sets it and
            leaves a zero gradient in `.grad`, as Megatron's optimizers expect. See `fusedmlp.contract`.

    Attributes:
        flat: the 1-D buffer. Between views there may be padding, always zero.
        params: the parameters, in order.

    Raises:
        ValueError: no parameters, several devices, a parameter given twice, a non-leaf, or one that has a main_grad.
    """

    def __init__(
        self, params: Iterable[Tensor], *, dtype: torch.dtype = torch.float32, grad_added_to_main_grad: bool = True
    ) -> None:
        self.params = list(params)
        self._lent = False  # inside as_grad
        self._check(dtype)
        sizes = [-(-param.numel() // _ALIGNMENT) * _ALIGNMENT for param in self.params]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=self.params[0].device)
        parts = zip(self.params, self.flat.split(sizes), strict=True)
        self._views = [part[: param.numel()].view(param.shape) for param, part in parts]
        for param, view in zip(self.params, self._views, strict=True):
            extended: Any = param
            extended.main_grad, extended._main_grad_owner = view, _NotPickled()
            if grad_added_to_main_grad:
                extended.grad_added_to_main_grad = False

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

    def zero_(self) -> None:
        """Start a step: zero the buffer, clear every `grad_added_to_main_grad`, drop every `.grad`."""
        self._refuse_now("zero_()")
        self.flat.zero_()
        for param in self.params:
            param.grad = None
            forget_overwrite(param)
            if hasattr(param, "grad_added_to_main_grad"):
                param.grad_added_to_main_grad = False

    def norm(self) -> Tensor:
        """Total 2-norm of all gradients, fp32, on the device; what is in `.grad` is moved into the buffer first."""
        self._absorb("norm() and clip_norm_()")
        norm: Tensor = torch.linalg.vector_norm(self.flat, dtype=torch.float32)
        return norm

    def clip_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that `norm()` is at most `max_norm`; the norm before, on the device."""
        norm = self.norm()
        self.flat.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def _absorb(self, what: str) -> None:
        """Move into `main_grad` what autograd left in `.grad`, so that norms and steps see all of the gradient."""
        self._refuse_now(what)
        for param in self.params:
            if param.grad is not None and not has_dummy_wgrad(param):
                param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
                param.grad = None

    @contextmanager
    def as_grad(self) -> Iterator[None]:
        """Inside, `.grad` of every parameter is its `main_grad` (cast if `.grad` needs another dtype).

        What autograd itself left in `.grad` (a layer that does not fuse) is added to `main_grad` first. Outside,
        `.grad` is None again, so that nothing is counted twice. A parameter without any gradient has a zero one, which
        an optimizer with weight decay or momentum still steps by; leave such parameters out of the buffer. One that
        was frozen since, and got no gradient in this step, has none.

        Raises:
            RuntimeError: inside, from `zero_()`, `norm()`, `clip_norm_()` and `as_grad()`: clip before. Or gradients
                of these parameters are still in a `WgradQueue`.
        """
        self._absorb("as_grad()")
        self._lent = True
        try:
            with torch.no_grad():
                for param in self.params:
                    main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
                    if param.requires_grad or getattr(param, "grad_added_to_main_grad", False) or main_grad.any():
                        param.grad = main_grad.to(grad_dtype(param))
            yield
        finally:
            self._lent = False
            for param in self.params:
                param.grad = None

    def _refuse_now(self, what: str) -> None:
        """Raise where `main_grad` is not the gradient of this step: it is lent, incomplete, or not ours any more."""
        if self._lent:
            raise RuntimeError(
                f"{what}: expected outside of as_grad(), inside which .grad is main_grad itself; got it inside"
            )
        for i, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            state = find_state(param)
            if state is not None and state.queued:
                raise RuntimeError(
                    f"{what}: expected every gradient to be computed; got one of params[{i}] that is still in a "
                    "WgradQueue: call backward_dw(), or queue.run(), before (queue.clear() to discard the step)"
                )
            if getattr(param, "main_grad", None) is not view:
                raise RuntimeError(
                    f"params[{i}]: expected the main_grad that this buffer gave it; got "
                    f"{'another' if hasattr(param, 'main_grad') else 'none'}, so that gradients go elsewhere (after "
                    "detach(), torch.utils.swap_tensors or another owner, make a new MainGradBuffer)"
                )

    def detach(self) -> None:
        """Take `main_grad`, `grad_added_to_main_grad` and dummies off the parameters again; `flat` stays."""
        for param in self.params:
            remove_dummy_wgrad(param)
            for name in ("main_grad", "grad_added_to_main_grad", "_main_grad_owner"):
                if hasattr(param, name):
                    delattr(param, name)
