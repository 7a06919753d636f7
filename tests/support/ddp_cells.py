"""Experts under PyTorch's DDP in every setting, against float64 autograd over all ranks' data. Runs in a `world`."""

import itertools
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.allocations import copies_and_allocations
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedmlp
from bench.oracle import reference as oracle
from bench.oracle.tolerance import assert_close
from fusedmlp.integrations.ddp import grads_in_buckets

EXPERTS, HIDDEN, FFN, ROWS, STEPS = 3, 16, 24, 5, 4


@dataclass(frozen=True)
class Cell:
    """One setting; the name of each field is what DDP calls it, where it has a name."""

    gradient_as_bucket_view: bool = True
    in_buckets: bool = True  # wrapped by `grads_in_buckets`
    set_to_none: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    micro_batches: int = 1  # all but the last under `no_sync`
    buckets: str = "one"
    comm_hook: str = "none"
    packed: bool = True
    mode: str = "auto"


HOOKS = ("mean", "gather", "bf16")


def cells(world_size):
    """All fields but hooks crossed with each other; each hook crossed with all but the kinds of graph, which rotate.

    On one rank, without hooks and without `no_sync`.
    """
    flags, alone = (False, True), world_size == 1
    graphs = tuple(itertools.product(flags, flags))
    where = ((False, False), (True, False), (True, True))
    common = list(itertools.product(where, flags, (1,) if alone else (1, 3)))
    settings = [(*c, graph, b, "none") for c in common for graph in graphs for b in ("one", "several")[alone:]]
    if not alone:
        settings += [
            (*c, graphs[i % 4], "several", hook) for h, hook in enumerate(HOOKS) for i, c in enumerate(common, start=h)
        ]
    for i, ((view, kept), none, micro, (unused, static), buckets, hook) in enumerate(settings):
        packed = (i + i // 4 + i // 16) % 2 == 0
        yield Cell(view, kept, none, unused, static, micro, buckets, hook, packed)
    for view, none, micro in itertools.product(flags, flags, (1,) if alone else (1, 3)):
        yield Cell(view, False, none, micro_batches=micro, mode="off")


class Model(torch.nn.Module):
    """A dense layer, experts, and a second layer of experts that is not used in every step."""

    def __init__(self, packed, mode):
        super().__init__()
        options = {"packed": packed, "accumulate_wgrad": mode}
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN)
        self.experts = fusedmlp.GroupedMLP(EXPERTS, HIDDEN, FFN, bias=True, **options)
        self.spare = fusedmlp.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, **options)

    def forward(self, x, counts, probs, use_spare):
        """`y` ("no"), the result of the spare experts ("yes"), or both, with the second unused ("ignored")."""
        y = self.experts(self.dense(x), counts, probs)
        if use_spare == "no":
            return y
        spare = self.spare(y, counts)
        return spare if use_spare == "yes" else (y, spare)


@cache
def batch(rank, step, micro):
    """Rows of every expert: expert 1 has none on rank 1, in odd steps on no rank."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    counts = [2, 0 if rank == 1 or step % 2 else 1]
    counts.append(ROWS - sum(counts))
    x, dy = torch.randn(2, ROWS, HIDDEN, generator=generator)
    return x, counts, torch.rand(ROWS, generator=generator), dy


def use_of_spare(cell, rank, step):
    """With `find_unused_parameters`, steps and ranks differ; `static_graph` does not support an ignored result."""
    if cell.static_graph:
        return "no"
    if not cell.find_unused_parameters:
        return "yes"
    return ("no", "yes" if rank == 0 else "no", "ignored", "yes")[step]


@cache
def state():
    torch.manual_seed(0)
    return {name: t.detach() for name, t in Model(True, "off").state_dict().items()}


def loop(w, x, counts, probs, use_spare):
    """The model in plain PyTorch, one expert at a time."""
    x = F.linear(x, w["dense.weight"], w["dense.bias"])
    weights, biases = ([w[f"experts.{fc}.{kind}"] for fc in oracle.WEIGHTS] for kind in ("weight", "bias"))
    y = oracle.rows(x, *weights, counts, probs.to(x.dtype), *biases)
    return oracle.gemm(y, w["spare.weight"], counts) if use_spare == "yes" else y


@cache
def reference(uses, step, micro_batches, dtype):
    """Gradients: the mean over ranks of the sum over micro-batches; `uses`: of the spare experts, by rank."""
    leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in state().items()}
    for rank, use in enumerate(uses):
        for micro in range(micro_batches):
            x, counts, probs, dy = batch(rank, step, micro)
            loop(leaves, x.to(dtype), counts, probs, use).backward(dy.to(dtype) / len(uses))
    return {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}


def packed_grads(model):
    """Gradients by the names of the packed form; zero where there is none."""
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    for name in [n for n in grads if n.endswith("0")]:
        grads[name[:-1]] = torch.stack([grads.pop(f"{name[:-1]}{e}") for e in range(EXPERTS)])
    return grads


def gather_hook(group, bucket):
    """A hook that is not in place: gather every rank's bucket, and return the mean in a new tensor."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]

    def mean(_):
        with torch.profiler.record_function("comm hook"):
            return torch.stack(parts).mean(0)

    return dist.all_gather(parts, bucket.buffer(), async_op=True).get_future().then(mean)


def wrap(cell, module):
    ddp = DistributedDataParallel(
        module,
        gradient_as_bucket_view=cell.gradient_as_bucket_view,
        find_unused_parameters=cell.find_unused_parameters,
        static_graph=cell.static_graph,
        bucket_cap_mb=25 if cell.buckets == "one" else 0.005,
    )
    if cell.comm_hook != "none":
        hook = {
            "mean": default_hooks.allreduce_hook,
            "gather": gather_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }[cell.comm_hook]

        def comm_hook(group, bucket) -> torch.futures.Future[torch.Tensor]:
            with torch.profiler.record_function("comm hook"):
                return hook(group, bucket)

        ddp.register_comm_hook(None, comm_hook)
    return ddp


def micro_batches(cell, step):
    """With `static_graph`, the first backward must not be under `no_sync`: DDP itself fails."""
    return 1 if cell.static_graph and step == 0 else cell.micro_batches


def backward(cell, ddp, step):
    rank, count = dist.get_rank(), micro_batches(cell, step)
    for micro in range(count):
        x, counts, probs, dy = batch(rank, step, micro)
        with nullcontext() if micro == count - 1 else ddp.no_sync():
            y = ddp(x, counts, probs, use_of_spare(cell, rank, step))
            (y[0] if isinstance(y, tuple) else y).backward(dy)


def run(cell):
    """Errors of every step, relative to the largest gradient; copies and allocations of a weight in one step."""
    world = dist.get_world_size()
    module = Model(cell.packed, cell.mode)
    module.load_state_dict(state())
    weights = [p for n, p in module.named_parameters() if "weight" in n and not n.startswith("dense")]
    used = [p for n, p in module.named_parameters() if "weight" in n and n.startswith("experts")]
    ddp = grads_in_buckets(module, weights, partial(wrap, cell)) if cell.in_buckets else wrap(cell, module)
    error, counted = 0.0, {}
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=cell.set_to_none)
        if step == 0:
            for _ in range(4):  # forwards without a backward (PyTorch commit 216c384)
                ddp(*batch(dist.get_rank(), step, 0)[:3], use_of_spare(cell, dist.get_rank(), step))
        if step == STEPS - 1 or (step == 0 and cell.micro_batches == 1 and cell.comm_hook == "none"):
            counted[step] = copies_and_allocations(lambda step=step: backward(cell, ddp, step), used)
        else:
            backward(cell, ddp, step)
        uses = tuple(use_of_spare(cell, rank, step) for rank in range(world))
        expected, low = (reference(uses, step, micro_batches(cell, step), t) for t in (torch.float64, torch.float32))
        got = {n: g.double() for n, g in packed_grads(module).items()}
        assert_close(got, expected, low, torch.bfloat16 if cell.comm_hook == "bf16" else torch.float32)
        largest = max(float(t.abs().max()) for t in expected.values())
        error = max(error, *(float((got[n] - expected[n]).abs().max()) / largest for n in got))
    return asdict(cell) | {"error": error, "first": counted.get(0), "steady": counted[STEPS - 1], "weights": len(used)}


def run_all():
    rows, failures = [], {}
    for cell in cells(dist.get_world_size()):
        try:
            rows.append(run(cell))
        except AssertionError as e:
            failures[str(cell)] = str(e)
    return rows, failures
