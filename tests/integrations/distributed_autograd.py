"""Distributed autograd (FAST mode) over RPC between two processes: `worker0` drives, `worker1` owns the remote layers.

A context's gradients must equal those of plain PyTorch in float64, and be in no other context, `.grad` or main_grad.
"""

from __future__ import annotations

import itertools
import threading

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from support.small_moe import batch, initial, plain_output, stacked
from support.systems import MODES, attach
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from bench.oracle.tolerance import errors_of

OTHER = "worker1"
BATCHES = [(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 0, 0)]  # rank, step, micro-batch; the last has no tokens
_owned = {}  # by mode and form, where the model lives: the model, its gradients at the start, and its buffer


def make(mode, packed):
    """Make a layer here whose gradients do not start from zero."""
    accumulate, memory, delayed = MODES[mode]
    model = initial(packed, accumulate, delay=delayed)
    buffer = attach(list(model.parameters()), memory, 0.5)
    _owned[mode, packed] = model, [places(p) for p in model.parameters()], buffer


def places(param):
    """Copies of `.grad` and main_grad; None where there is none."""
    return [None if t is None else t.clone() for t in (param.grad, getattr(param, "main_grad", None))]


def forward(mode, packed, x, counts, probs):
    model, *_ = _owned[mode, packed]
    return model(x, counts, probs)


def expected_gradients(model, batches, scale, dtype):
    """Gradients by plain PyTorch in `dtype`, summed over batches."""
    params = stacked({name: p.detach().to(dtype) for name, p in model.named_parameters()}, model.experts.fc1.packed)
    params = {name: p.requires_grad_() for name, p in params.items()}
    for one in batches:
        x, counts, probs, dy = batch(*one)
        plain_output(params, x.to(dtype), counts, probs.to(dtype)).backward(scale * dy.to(dtype)[: sum(counts)])
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}


def wrong_gradients(model, context, batches, scale=1.0):
    """Messages about wrong gradients in a context."""
    found = dist_autograd.get_gradients(context)
    missing = [name for name, p in model.named_parameters() if p not in found]
    if missing:
        return [f"not in the context: {missing}"]
    actual = stacked({name: found[p] for name, p in model.named_parameters()}, model.experts.fc1.packed)
    references = (expected_gradients(model, batches, scale, dtype) for dtype in (torch.float64, torch.float32))
    errors = errors_of(actual, *references, torch.float32)
    return [f"{name}: off by {error}" for name, error in errors.relative().items() if not error <= errors.allowed()]


def check(mode, packed, context, batches):
    """Messages about wrong gradients of a context in this process, and about anything else that changed."""
    model, before, _ = _owned[mode, packed]
    wrong = wrong_gradients(model, context, batches)
    for (name, param), start in zip(model.named_parameters(), before, strict=True):
        for now, then in zip(places(param), start, strict=True):
            if (now is None) != (then is None) or (now is not None and not torch.equal(now, then)):
                wrong.append(f"{name}: .grad or main_grad changed")
        if getattr(param, "grad_added_to_main_grad", False):
            wrong.append(f"{name}: the flag is set")
    queue = model.experts.wgrad_queue
    if queue is not None and len(queue):
        wrong.append("a gradient was queued")
    return wrong


def train(remote, mode, packed, context, batches):
    """Run the forward of some batches, then one backward; the graph goes through both processes either way.

    FAST mode waits for every RPC of the context to take part in its backward, so that there can be only one.
    """
    losses = []
    for one in batches:
        x, counts, probs, dy = batch(*one)
        if remote:
            y = rpc.rpc_sync(OTHER, forward, (mode, packed, x.requires_grad_(), counts, probs))
        else:
            y = rpc.rpc_sync(OTHER, torch.mul, (forward(mode, packed, x, counts, probs), 1.0))
        losses.append((y * dy).sum())
    dist_autograd.backward(context, losses)


def drive():
    """Run each cell in two contexts at once, in two threads; return the number of contexts, and messages by cell."""
    failures, count = {}, 0
    for remote, mode, packed in itertools.product([False, True], MODES, [True, False]):
        call = (lambda function, *args: rpc.rpc_sync(OTHER, function, args)) if remote else (lambda f, *args: f(*args))
        call(make, mode, packed)
        both, wrong = threading.Barrier(2), []

        def work(batches, remote=remote, mode=mode, packed=packed, call=call, both=both, wrong=wrong):
            with dist_autograd.context() as context:
                train(remote, mode, packed, context, batches)
                both.wait(timeout=600)
                wrong += call(check, mode, packed, context, batches)
                both.wait(timeout=600)

        threads = [threading.Thread(target=work, args=(batches,)) for batches in (BATCHES[:2], BATCHES[2:])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        count += 2 - (both.broken * 2)
        if wrong:
            failures[f"{'remote' if remote else 'local'} {mode} packed={packed}"] = wrong
    return count, failures


def under_ddp():
    """Run DDP inside a context: its averaged gradients must be in the context of every rank. Messages by cell."""
    failures = {}
    for mode, packed in itertools.product(["grad", "off", "buffer"], [True, False]):
        model = initial(packed, MODES[mode][0])
        buffer = attach(list(model.experts.parameters()), MODES[mode][1])
        model.zero_grad()
        wrapped = DistributedDataParallel(model)
        for step in range(2):
            with dist_autograd.context() as context:
                x, counts, probs, dy = batch(dist.get_rank(), step, 0)
                y = wrapped(x, counts, probs)
                dist_autograd.backward(context, [(y * dy).sum()])
                batches = [(rank, step, 0) for rank in range(dist.get_world_size())]
                wrong = wrong_gradients(model, context, batches, scale=1 / dist.get_world_size())
            wrong += [f"{name}: .grad" for name, p in model.named_parameters() if p.grad is not None]
            if wrong:
                failures[f"DDP {mode} packed={packed} step {step}"] = wrong
        del buffer
    for mode in ("main_grad", "delayed, main_grad", "delayed, .grad", "delayed, buffer"):
        accumulate, memory, delayed = MODES[mode]
        model = initial(True, accumulate, delay=delayed)
        attach(list(model.experts.parameters()), memory)
        wrapped = DistributedDataParallel(model)
        with dist_autograd.context():
            try:
                wrapped(*batch(0, 0, 0)[:3])
            except RuntimeError as error:
                if "DistributedDataParallel reduces this parameter's .grad" not in str(error):
                    failures[f"DDP {mode}"] = [str(error)]
            else:
                failures[f"DDP {mode}"] = ["not refused"]
    return failures


def run(rendezvous):
    """The number of contexts that were checked, and messages by cell."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{rendezvous}", rpc_timeout=600)
    rank = dist.get_rank()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    try:
        count, failures = drive() if rank == 0 else (0, {})
        dist.barrier()
        failures |= under_ddp()
    finally:
        rpc.shutdown()
    return count, failures
