"""Reads the state of PyTorch's autograd engine through its private functions; `owners/` uses those of frameworks.

`tests/contract/test_guards_of_use.py` fails when one of them changes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from enum import Enum
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_will_execute = torch._C._will_engine_execute_node
_numbers = count()  # of backwards
_VARIABLE, _REQUIRES_GRAD = attrgetter("variable"), attrgetter("requires_grad")

_PLAIN: tuple[type[Tensor], ...] = (FakeTensor, FunctionalTensor)  # tensors of the compiler
if torch.distributed.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # operators wait for it

    _PLAIN += (AsyncCollectiveTensor,)


# Tensors


def is_plain(tensor: Tensor) -> bool:
    """Whether an operator runs once, on this tensor's own memory.

    A subclass with a `__torch_dispatch__` (DTensor, quantised weights) may run an operator on other tensors, or several
    times. An operator that adds to a plain `main_grad` would then make it wrong without an error.
    """
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(tensor, _PLAIN)


def have_one_dtype_and_device(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have one dtype and one device; a single call into PyTorch, as a loop would take longer."""
    return len(torch._C._group_tensors_by_device_and_dtype([[*tensors]], False)) == 1


# The plan of the running backward


class EngineUse(Enum):
    """Use of a weight's gradient by the engine, in the running backward."""

    ACCUMULATE = "runs the leaf's AccumulateGrad"
    CAPTURE = "passes it on: to autograd.grad, to the graph of a non-leaf weight, to distributed autograd"
    DROP = "nothing: no gradient is wanted, or the leaf has been frozen"


ACCUMULATE, CAPTURE, DROP = EngineUse  # looked up once, not for every parameter


def engine_use(node: Any, current_node: Any) -> EngineUse:
    """Read the engine's plan for a gradient that flows from `current_node` to `node` (None: needs no gradient)."""
    if node is None:
        return DROP
    try:
        executed: bool = _will_execute(node)
    except RuntimeError:  # a leaf whose gradient is captured
        return CAPTURE
    if executed and isinstance(node, _AccumulateGrad):
        return ACCUMULATE if node.variable.requires_grad else DROP  # type: ignore[attr-defined]
    return CAPTURE if executed or not _plans_something(current_node) else DROP


def accumulates_into(nodes: Sequence[Any]) -> list[Tensor] | None:
    """The parameters of these nodes, if `engine_use` of each is ACCUMULATE; else None. Faster than asking for each."""
    if set(map(type, nodes)) != {_AccumulateGrad}:
        return None
    try:
        executed = all(map(_will_execute, nodes))
    except RuntimeError:  # a leaf whose gradient is captured
        return None
    params = [*map(_VARIABLE, nodes)]
    return params if executed and all(map(_REQUIRES_GRAD, params)) else None


def _plans_something(node: Any) -> bool:
    """Whether the engine has a plan for any node after this one.

    Distributed autograd, which captures the gradients of all leaves, has none. Otherwise there is one: a node runs
    only because at least one node after it has to.
    """
    try:
        return any(following is not None and _will_execute(following) for following, _ in node.next_functions)
    except RuntimeError:  # a leaf whose gradient is captured
        return True


def is_leaf_node(node: Any) -> bool:
    """Whether a graph node accumulates the gradient of a leaf, its `.variable`."""
    return isinstance(node, _AccumulateGrad)


def current_node() -> Any:
    """The graph node that the engine is running in this thread; None outside of a backward."""
    return torch._C._current_autograd_node()


def accumulating_nodes(node: Any) -> dict[int, Any]:
    """The AccumulateGrad nodes that follow a node (None: none), by the id of their parameter."""
    edges: Any = () if node is None else node.next_functions
    return {id(n.variable): n for n, _ in edges if is_leaf_node(n)}


def accumulating_node(param: Tensor) -> Any:
    """The AccumulateGrad node of a parameter; all graphs that are alive share it."""
    with torch.inference_mode(False):
        return torch.autograd.graph.get_gradient_edge(param).node


def inside_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward: its graph replaces the engine's nodes."""
    return inside_backward() and current_node() is None


def inside_backward() -> bool:
    """Whether this thread is running a backward. A forward inside one is, as a rule, a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1


# The scope of one backward


class Backward:
    """One backward as users see it: a run of the engine and the runs nested in it (reentrant checkpoints)."""

    def __init__(self) -> None:
        self.over = False
        self.number = next(_numbers)  # later ones are larger
        self.streams: set[torch.cuda.Stream] = set()  # wrote gradients that the engine does not see

    def join_stream(self, tensor: Tensor) -> None:
        """Before adding to `tensor`: make the current stream wait for `streams`, and add it to them."""
        if tensor.is_cuda and not isinstance(tensor, FakeTensor):  # which a memory estimator uses
            stream = torch.cuda.current_stream(tensor.device)
            for other in self.streams - {stream}:
                stream.wait_stream(other)
            self.streams.add(stream)


class _End:
    """Callback at the end of a backward. Only the engine refers to it: `__del__` also runs if the backward fails."""

    def __init__(self, task: int, backward: Backward) -> None:
        self.task, self.backward = task, backward

    def __call__(self) -> None:
        """Make the caller's streams wait for `streams`, as the engine does for gradients that it sees."""
        for stream in self.backward.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def __del__(self) -> None:
        if hasattr(self, "backward"):  # not interrupted in __init__
            self.backward.over = True
            _running.pop(self.task, None)


_running: dict[int, Backward] = {}  # by id of the graph task
_OUTER = "fusedmlp.backward"  # key of the outermost `Backward`, as `(backward,)`, in PyTorch's thread-local state


def current_backward() -> Backward:
    """The running backward; inside one in which `nest_backwards` was called, the outermost."""
    outer = _outer()
    if outer is not None:
        return outer
    task = torch._C._current_graph_task_id()
    backward = _running.get(task)
    if backward is None:
        backward = Backward()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(_End(task, backward))
        _running[task] = backward
    return backward


def nest_backwards() -> None:
    """In a checkpoint's recomputation: make backwards that the running node starts part of this one.

    This uses PyTorch's own thread-local state: the engine copies it to the thread that runs a nested backward, and
    resets it when the node ends.
    """
    stashed = (current_backward(),)  # new, so that nothing else changes how many refer to it
    references = sys.getrefcount(stashed)
    torch._C._stash_obj_in_tls(_OUTER, stashed)
    if sys.getrefcount(stashed) == references:  # torch 2.11 takes no reference, and still gives one up in the end
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stashed))


def _outer() -> Backward | None:
    """The backward of `nest_backwards`, while it runs; None elsewhere."""
    if not torch._C._is_key_in_tls(_OUTER):
        return None
    backward: Backward = torch._C._get_obj_in_tls(_OUTER)[0]
    return None if backward.over else backward


def other_threads() -> bool:
    """Whether another thread runs Python. If none does, only this thread can start one."""
    return len(sys._current_frames()) > 1


def others_run_backward() -> bool:
    """Whether another thread is inside a backward right now."""
    frames: dict[int, FrameType | None] = {**sys._current_frames()}
    frames.pop(threading.get_ident(), None)
    for frame in frames.values():
        while frame is not None:
            if frame.f_code is _RUN_BACKWARD:
                return True
            frame = frame.f_back
    return False


# Transforms that cannot be combined with gradients written in place


def inside_functorch_transform() -> bool:
    """Whether a `torch.func` transform is running."""
    return torch._C._are_functorch_transforms_active()


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, under vmap."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)


def fail_when_differentiated(message: str, results: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    """Return `results` (one or more) with a graph that raises `message` when it is differentiated by `sources`."""
    mark: Any = torch._C._functions.DelayedError(message.encode(), len(results) + len(sources))
    return list(mark(*results, *sources))[: len(results)]
