"""Helpers of tests/contract: sums of gradients, operators of AccumulateGrad, calls in threads that start together,
a queue without memory.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


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
