"""Helpers of tests/contract: parameters of tests, memory of the last step, plain uses of weights, sums of gradients,
one backward of many uses, operators of AccumulateGrad, calls in threads that start together, calls that fail.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.contract_model import Boom
from torch.profiler import ProfilerActivity, profile

import fusedmlp

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"),
    [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", True), ("moe", False)],
)
PACKED = pytest.mark.parametrize("packed", [True, False])
DELAYED = pytest.mark.parametrize("delayed", [False, True])
FUSE = pytest.mark.parametrize("fuse", [False, True])


def stale(layer, *, overwrites=False):
    """Give a layer main_grads of NaN, as if of the last step, and the flag; return it."""
    layer.attach(False)
    for param in layer.params:
        param.main_grad.fill_(float("nan"))
        if overwrites:
            param.overwrite_main_grad = True
    return layer


def stale_buffer(params):
    """A buffer whose memory holds NaN, and whose parameters have no gradient yet."""
    buffer = fusedmlp.MainGradBuffer(params)
    buffer.flat.fill_(torch.nan)
    buffer.zero_grad()
    return buffer


def plain(layer, factor=1):
    """A loss that uses every weight in plain PyTorch."""
    return sum((factor * p.square()).sum() for p in layer.params)


def of_plain(layer, *factors):
    """Gradients of `plain`, summed over the factors (default: 1)."""
    return [2 * sum(factors or (1,)) * p.detach().double() for p in layer.params]


def unchanged(tensors, before):
    """Whether all tensors have the bits that they had."""
    return all(torch.equal(tensor, held) for tensor, held in zip(tensors, before, strict=True))


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


@contextlib.contextmanager
def failing(owner, name, *, after=False, skip=0, inside=lambda: None):
    """Make the call of `owner.name` after `skip` others raise, before or after its effect; later calls work."""
    real, skipped = getattr(owner, name), 0

    def fails(*args, **options):
        nonlocal skipped
        if skipped < skip:
            skipped += 1
            return real(*args, **options)
        setattr(owner, name, real)
        inside()
        if after:
            real(*args, **options)
        raise Boom

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, real)
