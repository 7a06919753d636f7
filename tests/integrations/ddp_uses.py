"""Other uses of a model under DDP: where the GEMMs write, checkpoints, uneven inputs, copies. Runs in a `world`."""

import copy
import os
import pickle

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from support import wgrad_outputs
from support.ddp_cells import Model, batch, packed_grads, reference, state
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.oracle.tolerance import assert_close
from fusedmlp.integrations.ddp import grads_in_buckets


def in_buckets(module, parameters=None, **options):
    options = {"gradient_as_bucket_view": True} | options
    parameters = module.experts.parameters() if parameters is None else parameters
    return grads_in_buckets(module, parameters, lambda m: DistributedDataParallel(m, **options))


def new_model():
    model = Model(True, "grad")
    model.load_state_dict(state())
    return model


def check(module, uses, step):
    expected, low = (reference(uses, step, 1, dtype) for dtype in (torch.float64, torch.float32))
    assert_close({n: g.double() for n, g in packed_grads(module).items()}, expected, low, torch.float32)


def step_of(ddp, step, use="yes"):
    x, counts, probs, dy = batch(dist.get_rank(), step, 0)
    ddp(x, counts, probs, use).backward(dy)


def where_gemms_write(ddp=None):
    """GEMMs must write to the memory that DDP reduces, in every step."""
    reduced = set()

    def hook(group, bucket) -> torch.futures.Future[torch.Tensor]:
        reduced.update(t.data_ptr() for t in bucket.gradients())
        return default_hooks.allreduce_hook(group, bucket)

    ddp = ddp or in_buckets(new_model(), bucket_cap_mb=0.005)
    ddp.register_comm_hook(None, hook)
    for step in range(4):
        ddp.zero_grad()
        with wgrad_outputs.recorded() as written:
            step_of(ddp, step)
        check(ddp.module, ("yes", "yes"), step)
        assert len(set(written)) == 2
        assert reduced.issuperset(written)
        reduced.clear()


def checkpoints():
    class Recomputed(Model):
        def forward(self, *args):
            return checkpoint(super().forward, *args, use_reentrant=self.use_reentrant)

    for use_reentrant in (False, True):
        model = new_model()
        model.__class__ = Recomputed
        model.use_reentrant = use_reentrant
        ddp, pointers = in_buckets(model), set()
        for step in range(4):
            ddp.zero_grad(set_to_none=False)
            x, counts, probs, dy = batch(dist.get_rank(), step, 0)
            ddp(x.clone().requires_grad_(), counts, probs, "yes").backward(dy)
            check(model, ("yes", "yes"), step)
            pointers.add(model.experts.fc1.weight.grad.data_ptr())
        assert len(pointers) <= 2  # buckets are rebuilt once


def uneven_inputs():
    """Rank 1 stops after two steps; rank 0 goes on, and DDP keeps dividing by two."""
    ddp = in_buckets(new_model())
    with ddp.join():
        for step in range(4 if dist.get_rank() == 0 else 2):
            ddp.zero_grad()
            step_of(ddp, step)
            if step < 2:
                check(ddp.module, ("yes", "yes"), step)
    if dist.get_rank() == 0:
        single = reference(("yes",), 3, 1, torch.float64)
        for name, grad in packed_grads(ddp.module).items():
            torch.testing.assert_close(grad.double(), single[name] / 2, rtol=1e-5, atol=1e-5)


def copies_of_the_module():
    """Copies know nothing of the buckets, and evaluation leaves `.grad` alone."""
    ddp = in_buckets(new_model())
    step_of(ddp, 0)
    kept = [g.clone() for g in packed_grads(ddp.module).values()]
    for twin in (copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
        twin.zero_grad()
        x, counts, probs, dy = batch(dist.get_rank(), 1, 0)
        twin(x, counts, probs, "yes").backward(dy)
        assert all(torch.equal(k, g) for k, g in zip(kept, packed_grads(ddp.module).values(), strict=True))
    ddp.zero_grad()
    with torch.no_grad():
        ddp(*batch(0, 1, 0)[:3], "yes")
    assert all(p.grad is None for p in ddp.parameters())
    step_of(ddp, 2)
    check(ddp.module, ("yes", "yes"), 2)


def frozen_and_existing():
    """A frozen parameter is left out; a `.grad` from before is not lost."""
    model = new_model()
    model.experts.fc1.weight.requires_grad_(False)
    model.experts.fc2.weight.grad = torch.ones_like(model.experts.fc2.weight)
    ddp = in_buckets(model)
    assert model.experts.fc1.weight.grad is None
    step_of(ddp, 0)
    model.experts.fc2.weight.grad -= 1  # the mean of ones
    expected = reference(("yes", "yes"), 0, 1, torch.float64)["experts.fc2.weight"]
    torch.testing.assert_close(model.experts.fc2.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


def made_by_accelerate():
    """`accelerator.prepare_model` wraps the model, with the options of the `Accelerator`."""
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(dist.get_rank()))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(dist.get_world_size()))
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator, model = Accelerator(cpu=True, kwargs_handlers=[options]), new_model()
    where_gemms_write(grads_in_buckets(model, model.experts.parameters(), accelerator.prepare_model))


def refusal(**options):
    """The message that `grads_in_buckets` raises; asserts that it leaves no `.grad` behind."""
    model = new_model()
    try:
        in_buckets(model, **options)
    except (ValueError, TypeError) as e:
        assert all(p.grad is None for p in model.parameters())
        return str(e)
    return None


def run():
    for use in (
        where_gemms_write,
        checkpoints,
        uneven_inputs,
        copies_of_the_module,
        frozen_and_existing,
        made_by_accelerate,
    ):
        use()
    return {
        "no view": refusal(gradient_as_bucket_view=False),
        "not in DDP": refusal(parameters=[torch.nn.Parameter(torch.ones(2, 3))]),
        "DDP fails": refusal(bucket_cap_mb="much"),
    }
