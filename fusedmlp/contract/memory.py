"""Memory that a `MainGradBuffer` lends to `.grad`: how gradients of plain PyTorch come to it.

`.grad` is None, or the gradient of this step; there is no other state. A gradient that arrives when `.grad` is None is
stored into the lent memory, which becomes `.grad`; later ones are added. A tensor that somebody has put into `.grad` by
hand is added to, and stays until `bring_home`.

A pre-hook of the parameter's AccumulateGrad node consumes gradients of plain PyTorch: it stores or adds under the lock,
and hands on "no gradient". So no thread adds to lent memory without the lock, and 16-bit gradients are added to float32
memory without a temporary. A post-accumulate hook brings home what the pre-hook cannot consume.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from fusedmlp.contract import engine
from fusedmlp.contract.overwrite import refuse_compiled_writer
from fusedmlp.contract.parameter_state import ParameterState, accumulation_lock, find_states
from fusedmlp.contract.steps import restore, watch_steps
from fusedmlp.versions import no_frame, outside_of_graphs


def lend(param: Tensor, state: ParameterState, memory: Tensor, rounds: bool) -> Any:
    """Make `memory` that of the parameter's gradient; a gradient that is there moves into it.

    Returns the AccumulateGrad node, in which the pre-hook lives: the buffer keeps it. A state must not, as the node
    keeps the parameter.
    """
    grad, param.grad = param.grad, None
    param.grad_dtype = None
    if grad is not None:
        memory.copy_(grad.detach())
        param.grad = memory
    state.memory, state.rounds = memory, rounds
    node = engine.accumulating_node(param)
    state.consumers = [
        node.register_prehook(partial(_before, state)),
        param.register_post_accumulate_grad_hook(unserializable_hook(partial(_after, state))),
    ]
    watch_steps()
    return node


def take_back(param: Tensor, state: ParameterState) -> None:
    """Undo `lend`: `.grad` stays, in memory of its own and in the dtype of the parameter."""
    restore(param, state)
    for handle in state.consumers:
        handle.remove()
    grad, param.grad = param.grad, None
    state.memory, state.group, state.rounds, state.consumers = None, None, False, []
    param.grad_dtype = param.dtype
    param.grad = None if grad is None else grad.to(param.dtype, copy=True)


def lent(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The memory of each parameter that a buffer lends; None where there is none, or another owner has replaced it."""
    if torch.compiler.is_compiling():  # a graph asks when it runs
        return [None] * len(params)
    return [
        state.memory if state is not None and getattr(param, "main_grad", None) is state.memory else None
        for param, state in zip(params, find_states(params), strict=True)
    ]


def bring_home(param: Tensor, state: ParameterState) -> bool:
    """Move a `.grad` that somebody put there by hand into the lent memory. Returns whether there is a gradient."""
    restore(param, state)
    grad, memory = param.grad, state.memory
    if grad is None or memory is None:
        return False
    if grad is not memory:
        memory.copy_(grad.detach())
        param.grad = memory
    return True


# Both hooks run for every parameter in every backward, nearly always with nothing to do.
@no_frame
def _before(state: ParameterState, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
    """The pre-hook."""
    state.decided = True
    return None if grads[0] is None else _store(state, grads[0])


@outside_of_graphs
def _store(state: ParameterState, grad: Tensor) -> tuple[None] | None:
    """Store or add, and return "no gradient"; or leave that to PyTorch, by returning None.

    Under compiled autograd, which takes "no gradient" to mean that `.grad` is None, and `create_graph=True`, which adds
    out of place with a graph, PyTorch adds.
    """
    param, memory = state.ref(), state.memory
    state.decided = engine.current_node() is not None
    if param is None or memory is None or not param.requires_grad:
        return None
    if torch.is_grad_enabled() or not state.decided:
        return None
    with accumulation_lock, torch.no_grad():
        restore(param, state)
        if param.grad is not None and param.grad is not memory:
            return None  # a tensor that somebody put there
        refuse_compiled_writer(state, ("a parameter", None))
        engine.current_backward().join_stream(memory)
        if param.grad is not None:
            memory.add_(grad)
        elif grad.layout is torch.strided:
            memory.copy_(grad)
        else:
            memory.zero_().add_(grad)
        param.grad = memory
    return (None,)


@no_frame
def _after(state: ParameterState, param: Tensor) -> None:
    """The post-accumulate hook: bring home a `.grad` of which the pre-hook could not decide, or did not run."""
    if not state.decided:
        _move_home(state, param)
    state.decided = False


@outside_of_graphs
def _move_home(state: ParameterState, param: Tensor) -> None:
    grad, memory = param.grad, state.memory
    if grad is None or memory is None or grad is memory or grad.requires_grad:
        return
    if memory.shape == grad.shape and memory.device == grad.device and grad.layout is torch.strided:
        with accumulation_lock, torch.no_grad():
            bring_home(param, state)
