"""Reads the state of PyTorch's autograd engine with private functions; `reducers.py` has those about reducers.

`tests/contract/test_guards_of_use.py` fails when one of them changes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from enum import Enum
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
_VARIABLE, _REQUIRES_GRAD = attrgetter("variable"), attrgetter("requires_grad")

_PLAIN: tuple[type[Tensor], ...] = (FakeTensor, FunctionalTensor)  # the compiler's own
if torch.distributed.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # every operator waits for it

    _PLAIN += (AsyncCollectiveTensor,)


# Tensors


def is_plain(tensor: Tensor) -> bool:
    """Whether operators work on this tensor's memory, once.

    A subclass with a `__torch_dispatch__` (DTensor, quantised weights) runs an operator as it likes: on other tensors,
    or several times, and one that adds to a plain `main_grad` would then be wrong in silence.
    """
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(tensor, _PLAIN)


def have_one_dtype_and_device(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have one dtype and one device; one call asks for all."""
    return len(torch._C._group_tensors_by_device_and_dtype([[*tensors]], False)) == 1


# The plan of the running backward


class EngineUse(Enum):
    """What the engine does, in the running backward, with a gradient for one weight."""

    ACCUMULATE = "runs the leaf's AccumulateGrad"
    CAPTURE = "hands it to somebody: autograd.grad, a non-leaf weight, distributed autograd"
    DROP = "nothing: no gradient is wanted, or the leaf was frozen since"


ACCUMULATE, CAPTURE, DROP = EngineUse  # looked up once, not for every parameter


def engine_use(node: Any, current_node: Any) -> EngineUse:
    """Read the engine's plan for the graph node that a gradient flows to (None: needs no grad) from the current one."""
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
    """The parameters that all of these nodes accumulate into, in the running backward; None: some do not."""
    if set(map(type, nodes)) != {_AccumulateGrad}:
        return None
    try:
        executed = all(map(_will_execute, nodes))
    except RuntimeError:  # a leaf whose gradient is captured
        return None
    params = [*map(_VARIABLE, nodes)]
    return params if executed and all(map(_REQUIRES_GRAD, params)) else None


def _plans_something(node: Any) -> bool:
    """Whether the engine knows a plan for what follows a node; distributed autograd captures all leaves and has none.

    Another engine runs a node for the sake of at least one that follows it.
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
    """The AccumulateGrad node of a parameter, which all graphs that are alive share."""
    with torch.inference_mode(False):
        return torch.autograd.graph.get_gradient_edge(param).node


def inside_compiled_autograd() -> bool:
    """Whether a graph of compiled autograd runs in the place of the engine's nodes."""
    return inside_backward() and current_node() is None


def inside_backward() -> bool:
    """Whether this thread is running a backward; a forward is a checkpoint's second one then."""
    return torch._C._current_graph_task_id() != -1


# The scope of one backward


class Backward:
    """One run of the engine and the runs nested in it (reentrant checkpoints), which to the user are one backward."""

    def __init__(self) -> None:
        self.over = False
        self.streams: set[torch.cuda.Stream] = set()  # that wrote gradients of which the engine knows nothing

    def join_stream(self, tensor: Tensor) -> None:
        """Before `tensor` is added to: let the current stream wait for those that did so in this backward."""
        if tensor.is_cuda and not isinstance(tensor, FakeTensor):  # of a memory estimator
            stream = torch.cuda.current_stream(tensor.device)
            for other in self.streams - {stream}:
                stream.wait_stream(other)
            self.streams.add(stream)


class _End:
    """Callback for the end of a backward. The engine alone holds it, and lets go of it also if the backward fails."""

    def __init__(self, task: int, backward: Backward) -> None:
        self.task, self.backward = task, backward

    def __call__(self) -> None:
        """On the streams from which backward was called, as the engine does for the gradients that it knows."""
        for stream in self.backward.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def __del__(self) -> None:
        if hasattr(self, "backward"):  # not interrupted in __init__
            self.backward.over = True
            _running.pop(self.task, None)


_running: dict[int, Backward] = {}  # by graph task
_OUTER = "fusedmlp.backward"


def current_backward() -> Backward:
    """The backward that is running, which is the outermost one if `nest_backwards` was called there."""
    if torch._C._is_key_in_tls(_OUTER):
        outer: Backward = torch._C._get_obj_in_tls(_OUTER)
        if not outer.over:
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
    """In a checkpoint's second forward: backwards that the node which is running starts are part of this one.

    PyTorch's own thread-local state is what follows a nested backward into the thread that the engine runs it in, and
    ends with the node.
    """
    torch._C._stash_obj_in_tls(_OUTER, current_backward())


def other_threads() -> bool:
    """Whether there is another thread that runs Python; one that does cannot start without one that does."""
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


def is_nested(on_gpu: bool) -> bool:
    """Whether the running backward was started by another one that `current_backward` knows nothing of.

    Then the thread shows it: nodes of a GPU run in one of the engine's own, others where backward was called, but deep
    inside in one of the engine's too, which Python did not start.
    """
    if torch._C._is_key_in_tls(_OUTER) and not torch._C._get_obj_in_tls(_OUTER).over:
        return False
    runs, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        runs += frame.f_code is _RUN_BACKWARD
    return runs > 0 if on_gpu else runs > 1 or isinstance(threading.current_thread(), threading._DummyThread)


# What cannot be combined with gradients that are written in place


def inside_functorch_transform() -> bool:
    """Whether a `torch.func` transform is running."""
    return torch._C._are_functorch_transforms_active()


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several, under vmap."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)


def fail_when_differentiated(message: str, results: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    """`results` (one or more) with a graph: every way from them to `sources` raises when it is differentiated."""
    mark: Any = torch._C._functions.DelayedError(message.encode(), len(results) + len(sources))
    return list(mark(*results, *sources))[: len(results)]
