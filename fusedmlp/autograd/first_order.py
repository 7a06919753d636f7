"""Runs backwards unrecorded, and makes double backward raise: autograd does not record writes into given tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusedmlp.contract import engine
from fusedmlp.contract.exclusion import release
from fusedmlp.contract.parameter_state import accumulation_lock
from fusedmlp.contract.route import Routes
from fusedmlp.versions import outside_of_wrong_graphs

_Grads = TypeVar("_Grads")
_OfLayer = tuple[Tensor | None, ...]


def refuse_second_order(grads: _Grads, sources: Sequence[Tensor | None], way: str) -> _Grads:
    """Under `create_graph=True`: return the gradients with a graph that raises if they are differentiated.

    `torch.autograd.function.once_differentiable` does not suffice: where the incoming gradient is a constant, as for
    `y.sum()`, it returns constants, and a gradient penalty would lose its own gradient without an error.

    Args:
        grads: the gradients that a backward returns: tensors and None, also in lists.
        sources: the tensors from which they were computed.
        way: description of the second differentiation, for the message.
    """
    if not torch.is_grad_enabled():
        return grads
    recorded = [tensor for tensor in sources if tensor is not None and tensor.requires_grad]
    leaves, spec = tree_flatten(grads)
    found = [leaf for leaf in leaves if leaf is not None]
    if not recorded or not found:
        return grads
    message = f"fusedmlp: expected first-order gradients alone; got double backward {way}, which is not supported"
    marked = iter(engine.fail_when_differentiated(message, found, recorded))
    result: _Grads = tree_unflatten([None if leaf is None else next(marked) for leaf in leaves], spec)
    return result


def first_order_only(
    backward: Callable[[Any, Sequence[Any], Tensor, Routes], _OfLayer],
) -> Callable[[Any, Tensor], _OfLayer]:
    """Run a layer's backward `(ctx, saved tensors, dy, routes)` unrecorded; abandon its `routes` if it fails."""

    @outside_of_wrong_graphs  # where a whole step is compiled, and this function reached as a frame of its own
    @wraps(backward)
    def run(ctx: Any, dy: Tensor) -> _OfLayer:
        if torch.compiler.is_compiling():  # a graph has no second order
            return backward(ctx, ctx.saved_tensors, dy, Routes(recorded=False))
        if engine.is_batched(dy):
            raise RuntimeError(
                "fusedmlp: a backward under vmap (autograd.grad(..., is_grads_batched=True), jacobian(vectorize=True)) "
                "is not supported; expected one backward for each gradient of y"
            )
        saved = ctx.saved_tensors  # before the lock: a checkpoint recomputes them, with collectives of its region
        routes = Routes(recorded=torch.is_grad_enabled())
        with accumulation_lock, torch.no_grad():
            try:
                grads = backward(ctx, saved, dy, routes)
            except BaseException:
                for abandoned in routes:
                    abandoned.destination.undo(abandoned)
                raise
            finally:
                for done in routes:
                    release(done.held)
        return refuse_second_order(grads, (dy, *saved), "(create_graph=True, then differentiating the gradients)")

    return run
