"""`accumulate_wgrad="grad"`: an existing `param.grad`, or the memory that a `MainGradBuffer` lends to it. Without
either, the gradient is returned, and becomes `.grad`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat

from torch import Tensor

from fusedmlp.contract import engine
from fusedmlp.contract.checks import (
    check_kind,
    check_memory,
    refuse_late_hooks,
    refuse_tensor_hooks,
    same_strides,
)
from fusedmlp.contract.destinations.destination import Destination, Route, Targets
from fusedmlp.contract.memory import lent
from fusedmlp.contract.overwrite import refuse_compiled_writer
from fusedmlp.contract.parameter_state import Place
from fusedmlp.contract.steps import restore


class Grad(Destination):
    """Add to `.grad` where there is one and a GEMM may; other threads wait until it has."""

    name = "grad"
    if_recorded = "off"  # PyTorch adds out of place, with a graph, and needs the gradient returned

    def refuse_late(self, route: Route) -> None:
        """Refuse hooks that would run too early or see None, and a `.grad` that a GEMM cannot add to."""
        group = route.group
        if group is not None and not group.has_late_hooks(route.params) and group.stores(route.params) is not None:
            return
        for i, param, _ in route.leaves:
            refuse_late_hooks(param, route.place(i))
            refuse_tensor_hooks(param, route.place(i))
            existing_grad(param, param, param.grad, route.place(i))

    def open(self, route: Route) -> Targets:
        """Choose the existing `.grad`s, or lent memory."""
        if route.group is not None and route.group.stores(route.params) is not None:
            return route.group.memory  # type: ignore[return-value]
        for i, _, state in route.leaves:
            if state is not None and state.compiled_in is not None:
                refuse_compiled_writer(state, route.place(i))
        targets = self.existing(route, [])
        return targets if route.delayed else _of_one_kind(targets)

    def existing(self, route: Route, others: Sequence[Tensor]) -> Targets:
        """The `.grad`s to which the GEMM may add. `others`: leaves for which other threads must wait, too."""
        targets: Targets = lent(route.params)
        for i, param, state in route.leaves:
            if state is not None:
                restore(param, state)
            if param.grad is not None and param.grad is not targets[i]:
                targets[i] = None  # a tensor that somebody put there
            elif targets[i] is not None:
                targets[i] = _of_buffer(route, i, param, targets[i])
        for i, use in enumerate(route.uses):
            targets[i] = targets[i] if use is engine.ACCUMULATE else None
        leaves = [leaf for leaf in route.leaves if targets[leaf[0]] is None]
        leaves = [leaf for leaf in leaves if route.delayed or leaf[1].grad is not None]
        if leaves or others:
            params = [*(param for _, param, _ in leaves), *others]
            route.hold_others([param for param in params if route.delayed or param.is_cpu])
        for i, param, _ in leaves:
            if route.may_add(param):
                targets[i] = existing_grad(param, param, param.grad, route.place(i), returnable=not route.delayed)
        return targets

    def decide(self, route: Route, targets: Targets) -> None:
        """Store into lent memory where `.grad` is None, and make it `.grad`."""
        params: Sequence[Tensor] = route.params
        if route.group is None or targets is not route.group.memory:
            stored = [(p, targets[i]) for i, p, _ in route.leaves if p.grad is None and targets[i] is not None]
            params, targets = [param for param, _ in stored], [target for _, target in stored]
        elif params[0].grad is not None:
            return  # no `.grad` is None
        route.overwrites = {*map(id, params)}
        deque(map(setattr, params, repeat("grad"), targets), 0)

    def undo(self, route: Route) -> None:
        """If the gradient was to be stored, let the next one be."""
        for param in route.params:
            if id(param) in route.overwrites:
                param.grad = None

    def keep(self, route: Route, grads: Targets) -> list[tuple[Tensor, Tensor]]:
        """Set `.grad` where there was none, unless another thread may be adding to it."""
        left = []
        for param, grad in zip(route.params, grads, strict=True):
            if grad is not None and route.may_add(param):
                param.grad = grad
            elif grad is not None:
                left.append((param, grad))
        return left


def _of_buffer(route: Route, i: int, param: Tensor, memory: Tensor | None) -> Tensor | None:
    """Lent memory, if a GEMM may write there; None: a hook of the parameter expects the gradient."""
    assert memory is not None
    if (param.shape, param.device) != (memory.shape, memory.device):
        check_kind(param, memory, "main_grad", route.place(i))
    return None if param._backward_hooks and not route.delayed else memory


def existing_grad(
    param: Tensor, weight: Tensor, grad: Tensor | None, place: Place, *, returnable: bool = False
) -> Tensor | None:
    """The `.grad` to which a GEMM may add a parameter's gradient; None if there is none.

    Raises if a GEMM may not add to it (a tensor hook, a wrong kind of tensor). If the gradient is `returnable`, returns
    None instead, and PyTorch adds it. A `.grad` whose elements share memory always raises: PyTorch's addition would be
    wrong or fail. If `param` is a DTensor, `weight` and `grad` are local tensors.
    """
    if grad is None:
        return None
    try:
        refuse_tensor_hooks(param, place)
        check_kind(weight, grad, ".grad", place)
    except (RuntimeError, TypeError, ValueError):
        if not returnable:
            raise
        return None
    check_memory(grad, ".grad", place)
    return grad


def _of_one_kind(targets: Targets) -> Targets:
    """Keep the targets that one GEMM can add to together: distinct, with the dtype and strides of the first.

    None stands for those that are left out.
    """
    present = [target for target in targets if target is not None]
    kinds = {(target.dtype, target.stride()) for target in present}
    if len(kinds) <= 1 and len(set(map(id, present))) == len(present):
        return targets
    kept: Targets = []
    for target in targets:
        alike = target is not None and target.dtype == present[0].dtype and same_strides(target, present[0])
        kept.append(target if alike and not any(target is other for other in kept) else None)
    return kept
