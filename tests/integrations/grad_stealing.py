"""Hooks of every kind on expert weights, in plain PyTorch and under DDP, checkpointed or not. Runs in a `world`."""

import itertools
from functools import partial

import torch
import torch.distributed as dist
from support import wgrad_outputs
from support.allocations import copies_and_allocations
from support.ddp_cells import Model, batch, packed_grads, reference, state
from support.grids import part
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.oracle.tolerance import assert_close
from fusedmlp.integrations.ddp import grads_in_buckets

HOOKS = (
    "no hook",
    "tensor hook",
    "post-accumulate hook",
    "node pre-hook",
    "node post-hook",
    "multi-grad hook, any",
    "full backward hook",
    "full backward pre-hook",
)
TENSOR_HOOKS = ("tensor hook", "multi-grad hook, any")
ENGINES = ("plain", "DDP", "DDP, bucket view", "DDP, in buckets")
CHECKPOINTS = (None, False, True)  # use_reentrant


def register(kind, module, params, calls):
    """Register a hook that counts its calls in `calls`, and keeps no tensor. Returns what must stay alive."""

    def hook(*_):
        calls.append(kind)

    if kind == "tensor hook":
        return [param.register_hook(hook) for param in params]
    if kind == "post-accumulate hook":
        return [param.register_post_accumulate_grad_hook(hook) for param in params]
    if kind.startswith("node"):
        nodes = [param.view_as(param).grad_fn.next_functions[0][0] for param in params]
        return nodes, [(n.register_prehook if "pre" in kind else n.register_hook)(hook) for n in nodes]
    if kind == "multi-grad hook, any":
        return register_multi_grad_hook(params, hook, mode="any")
    if kind == "full backward hook":
        return module.register_full_backward_hook(hook)
    if kind == "full backward pre-hook":
        return module.register_full_backward_pre_hook(hook)
    return None


class Checkpointed(torch.nn.Module):
    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x, counts, probs):
        call = partial(self.inner, counts=counts, probs=probs, use_spare="yes")
        return call(x) if self.use_reentrant is None else checkpoint(call, x, use_reentrant=self.use_reentrant)


def run(kind, engine, use_reentrant, packed, mode, step):
    model = Model(packed, mode)
    model.load_state_dict(state())
    params = [p for name, p in model.experts.named_parameters() if "weight" in name]
    module, ranks = Checkpointed(model, use_reentrant), dist.get_world_size()
    wrap = partial(DistributedDataParallel, gradient_as_bucket_view="b" in engine)
    if engine == "DDP, in buckets":
        module = grads_in_buckets(module, params, wrap)
    elif engine != "plain":
        module = wrap(module)
    else:
        ranks = 1
    calls = []
    alive = register(kind, model.experts, params, calls)
    x, counts, probs, dy = batch(dist.get_rank() if ranks > 1 else 0, step, 0)
    with wgrad_outputs.recorded() as written:
        counted = copies_and_allocations(
            lambda: module(x.clone().requires_grad_(), counts, probs).backward(dy), params, within="AccumulateGrad"
        )
    # One for each parameter, one for x, and one for the x that a reentrant checkpoint detaches.
    assert counted["nodes"] == len(list(model.parameters())) + 1 + (use_reentrant is True), counted
    assert counted["copies"] == counted["allocations"] == 0, counted
    assert (kind == "no hook") == (not calls)
    if engine != "DDP, bucket view":  # there DDP has replaced the stolen tensor by a view of its own
        assert written == [p.grad.data_ptr() for p in params]
    expected, low = (reference(("yes",) * ranks, step, 1, dtype) for dtype in (torch.float64, torch.float32))
    assert_close({n: g.double() for n, g in packed_grads(model).items()}, expected, low, torch.float32)
    del alive


def held_by_a_hook(packed):
    """Number of weight gradients that are copied because one hook on all of them holds them until the last has come."""
    model = Model(packed, "off")
    params = [p for name, p in model.experts.named_parameters() if "weight" in name]
    register_multi_grad_hook(params, lambda _: None, mode="all")
    x, counts, probs, dy = batch(0, 0, 0)
    y = model(x, counts, probs, "yes")
    return copies_and_allocations(lambda: y.backward(dy), params, within="AccumulateGrad")["copies"]


def all_cells():
    for i, cell in enumerate(itertools.product(HOOKS, ENGINES, CHECKPOINTS, (True, False))):
        kind, engine, *_ = cell
        if kind in TENSOR_HOOKS and engine == "DDP, in buckets":
            continue  # refused: the hook would see None (tests/contract)
        yield *cell, "off" if i % 4 < 2 and engine != "DDP, in buckets" else "grad", i % 4


def run_all(quick):
    failures, every = {}, list(all_cells())
    chosen = part(every) if quick else every
    for cell in chosen:
        try:
            run(*cell)
        except AssertionError as e:
            failures[str(cell)] = str(e)
    return len(chosen), failures, [held_by_a_hook(packed) for packed in (True, False)]
