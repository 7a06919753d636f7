"""Helpers of tests/contract: kinds of layers, main_grads of the last step, sums of gradients, one backward of many
uses, operators of AccumulateGrad, calls in threads that start together, a queue without memory.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"),
    [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", True), ("moe", False)],
)


def stale(layer, *, overwrites=False):
    """Give a layer main_grads of NaN, as if of the last step, and the flag; return it."""
    layer.attach(False)
    for param in layer.params:
        param.main_grad.fill_(float("nan"))
        if overwrites:
            param.overwrite_main_grad = True
    return layer


def one_backward(layer, *seeds, call=None, **options):
    """Run one backward through a forward for each seed; `call` runs the layer, or what is around it."""
    batches = [layer.batch(seed) for seed in seeds]
    outputs = [(call or layer)(x.requires_grad_(), **options) for x, _ in batches]
    torch.autograd.backward(outputs, [dy for _, dy in batches])


def plus(*lists):
    """The sum of lists of tensors, element by element."""
    return [sum(tensors) for tensors in zip(*lists, strict=True)]


def operators_under_accumulate_grad(run):
    """Count the AccumulateGrad nodes that run; return that, and the names of all operators that they call."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    nodes = [e for e in prof.events() if e.name == "torch::autograd::AccumulateGrad"]
    below, stack = [], [child for node in nodes for child in node.cpu_children]
    while stack:
        event = stack.pop()
        below.append(event.name)
        stack += event.cpu_children
    return len(nodes), below


def in_threads(*calls):
    """Run each call in a thread of its own, all begun together; return their results, or raise the first error."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait(600)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def run_without_memory(queue, monkeypatch):
    """Run a queue that cannot allocate an output beside the gradients that exist."""

    def fails(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty_strided", fails)
        with pytest.raises(torch.OutOfMemoryError):
            queue.run()
