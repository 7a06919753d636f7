"""`accumulate_wgrad="main_grad"`: `param.main_grad`, which an owner like Megatron-core allocates and reduces."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.checks import (
    are_alike,
    check,
    check_group,
    label,
    refuse_late_hooks,
    refuse_tensor_hooks,
)
from fusedmlp.contract.destinations.destination import Destination, Route, Targets
from fusedmlp.contract.dummy import set_dummy_wgrad
from fusedmlp.contract.overwrite import (
    any_asks,
    asks,
    refuse_compiled_writer,
    refuse_superseded,
    refuse_to_be_erased,
    takes_overwrite,
)
from fusedmlp.contract.parameter_state import ParameterState, Place, waiting
from fusedmlp.contract.plain_gradient import (
    adopt_plain_gradient,
    catch_plain_gradients,
    refuse_earlier_plain_gradient,
)
from fusedmlp.contract.steps import watch_steps

_SHAPE, _REQUIRES_GRAD, _HOOKS = attrgetter("shape"), attrgetter("requires_grad"), attrgetter("_backward_hooks")


class MainGrad(Destination):
    """Add to `main_grad`, or overwrite it with `overwrite_main_grad`. The attribute must be there."""

    name = "main_grad"
    beside_grad = may_trace = True

    def find(self, params: Sequence[Tensor]) -> list[bool]:
        """Find the attribute."""
        return [getattr(param, "main_grad", None) is not None for param in params]

    def tensors(self, params: Sequence[Tensor]) -> Targets:
        """The `main_grad`s."""
        return [getattr(param, "main_grad", None) for param in params]

    def enter(self, param: Tensor, state: ParameterState) -> None:
        """Let gradients of plain PyTorch be caught, if the parameter has `grad_added_to_main_grad`."""
        state.home = self
        if hasattr(param, "grad_added_to_main_grad"):
            catch_plain_gradients(param, state)

    def refuse(self, param: Tensor, place: Place) -> None:
        """Refuse tensor hooks, and a `main_grad` that is missing or that a GEMM may not write to."""
        refuse_tensor_hooks(param, place)
        self.checked(param, place)

    def checked(self, param: Tensor, place: Place) -> Tensor:
        """The `main_grad` of one parameter; raises if there is none, or a GEMM may not write to it."""
        (target,) = self.tensors([param])
        if target is None:
            raise no_main_grad(label(place))
        check(param, target, "main_grad", place)
        return target

    def refuse_late(self, route: Route) -> None:
        """Refuse what `open` would, and hooks that would run too early."""
        self._existing(route)
        for i, param, _ in route.leaves:
            if param._post_accumulate_grad_hooks:
                refuse_late_hooks(param, route.place(i))
            if asks(param):
                route.asked.add(id(param))

    def open(self, route: Route) -> Targets:
        """Choose the `main_grad` of every parameter whose gradient is accumulated."""
        targets = self._existing(route)
        asked = any(other.asked for other in waiting())
        for i, param, state in route.leaves:
            if asked or state.compiled_in or state.overwritten_in:
                backward = route.backward or engine.current_backward()
                refuse_compiled_writer(state, route.place(i))
                refuse_superseded(state, backward, route.place(i))
                refuse_to_be_erased(param, backward, route.place(i), route.last)
        return targets

    def decide(self, route: Route, targets: Targets) -> None:
        """Decide which parameters' `main_grad` the GEMM overwrites."""
        asked = route.asked if route.delayed else any_asks(route.params)
        for _, param, state in route.leaves if asked else ():
            if id(param) in route.asked if route.delayed else asks(param):
                backward = route.backward or engine.current_backward()
                if takes_overwrite(param, state, backward):
                    route.overwrites.add(id(param))

    def _existing(self, route: Route) -> list[Any]:
        """The `main_grad` of every parameter whose gradient is accumulated, checked; None for others."""
        targets: Targets = [None] * len(route.params)
        params = [param for _, param, _ in route.leaves]
        main_grads: list[Any] = self.tensors(params)
        if not _are_right(params, main_grads):  # look again, one by one, which takes longer
            main_grads = [self.checked(param, route.place(i)) for i, param, _ in route.leaves]
            check_group(route.name, main_grads)
        for (i, *_), target in zip(route.leaves, main_grads, strict=True):
            targets[i] = target
        for i, param, state in route.leaves if any_asks(params) or any(map(_HOOKS, params)) else ():
            hooks = param._backward_hooks
            refuse_earlier_plain_gradient(param, state, route.place(i))
            if hooks and (len(hooks) > 1 or state.catch is None or state.catch.id not in hooks):
                refuse_tensor_hooks(param, route.place(i))
        _refuse_common(route, self.name, targets)
        return targets

    def written(self, route: Route) -> None:
        """Set the flag and the dummy of parameters with `grad_added_to_main_grad`."""
        flagged = [leaf for leaf in route.leaves if hasattr(leaf[1], "grad_added_to_main_grad")]
        if flagged:
            watch_steps()
        for i, param, state in flagged:
            if param.grad is not None and not param.grad_added_to_main_grad:  # type: ignore[attr-defined]
                adopt_plain_gradient(param, param.grad, self.checked(param, route.place(i)))
            param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            set_dummy_wgrad(param, state)
            if state.catch is None or state.home is None:  # forward knew of no main_grad, or of no flag
                self.enter(param, state)

    def undo(self, route: Route) -> None:
        """If the gradient was to overwrite, let the next one do so."""
        for _, param, state in route.leaves:
            if id(param) in route.overwrites:
                state.overwritten_in = None


def _refuse_common(route: Route, what: str, targets: Targets) -> None:
    """Raise if two parameters have one tensor in common; `targets` has one for each, None: none, or a fresh one."""
    if len(set(map(id, targets))) == len(targets):
        return
    first: dict[int, int] = {}
    for i, target in enumerate(targets):
        owner = first.setdefault(id(target), i)
        if target is not None and route.params[owner] is not route.params[i]:  # unless experts share the parameter
            of, its = label(route.place(i)), label(route.place(owner))
            raise ValueError(f"{of}: expected a {what} of its own; got that of {its}")


def no_main_grad(what: str) -> RuntimeError:
    """The error for a parameter without `main_grad`."""
    return RuntimeError(
        f'{what}: accumulate_wgrad="main_grad" expects a main_grad attribute on the parameter; got none '
        "(attach one with fusedmlp.MainGradBuffer)"
    )


def _are_right(params: Sequence[Tensor], targets: Sequence[Any]) -> bool:
    """Tell whether the tensors are alike, and the first one passes all checks."""
    if (
        not are_alike(targets)
        or targets[0] is None
        or any(map(_REQUIRES_GRAD, targets[1:]))
        or len(set(map(_SHAPE, params))) > 1  # forward found them alike; one has been changed since
    ):
        return False
    try:
        check(params[0], targets[0], "main_grad", ("", None))
    except (TypeError, ValueError):
        return False
    return True
