"""Experts whose weights are DTensors over a mesh of expert parallelism, alone and under FSDP2, against float64.

Every rank has its own rows for its own experts, as after a dispatch, so that the sum over micro-batches (and the mean
over the ranks that FSDP2 reduces) is the gradient of a shard.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from support.contract_helpers import operators_under_accumulate_grad
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fusedmlp
from bench.oracle import reference, tolerance
from fusedmlp.contract.owners.fsdp2 import unsharded_params
from fusedmlp.integrations.fsdp2 import accumulate_in

E, H, F, SHARDS, MICRO_BATCHES, STEPS = 4, 6, 5, 2, 3, 2
COUNTS = [[3, 0], [0, 4], [2, 5]]  # by micro-batch
MODES = ("off", "grad", "auto")


class Experts(nn.Module):
    """Weights as DTensors, whose local tensors are multiplied."""

    def __init__(self, mesh, mode, checkpointed):
        super().__init__()
        self.mode, self.checkpointed = mode, checkpointed
        self.fc1, self.fc2 = (nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in numbers())

    def forward(self, x, counts):
        return checkpoint(self.mlp, x, counts, use_reentrant=False) if self.checkpointed else self.mlp(x, counts)

    def mlp(self, x, counts):
        weights = self.fc1.to_local(), self.fc2.to_local()
        return fusedmlp.grouped_mlp(x, *weights, counts, accumulate_wgrad=self.mode)


def numbers():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) * 0.5 for shape in ((E, 2 * F, H), (E, H, F))]


def batch(rank, step, micro_batch):
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro_batch)
    counts = COUNTS[micro_batch]
    return [torch.randn(sum(counts), H, generator=generator) for _ in range(2)], counts


def plain_gradients(dtype, ranks, shard):
    """Gradients of a shard of the experts, by step and weight: the mean over `ranks`, summed in at least float32."""
    results = {}
    for step in range(STEPS):
        sums = [0, 0]
        for rank, micro_batch in itertools.product(ranks, range(MICRO_BATCHES)):
            (x, dy), counts = batch(rank, step, micro_batch)
            weights = [w.chunk(SHARDS)[shard].to(dtype).requires_grad_() for w in numbers()]
            reference.rows(x.to(dtype), *weights, counts).backward(dy.to(dtype) / len(ranks))
            wide = torch.promote_types(dtype, torch.float32)
            sums = [total + w.grad.to(wide) for total, w in zip(sums, weights, strict=True)]
        results |= {f"fc{i + 1}, step {step}": s.double() for i, s in enumerate(sums)}
    return results


def gradients(mesh, mode, dtype, checkpointed, reshard):
    """The same by fusedmlp; addresses of `.grad` by step and micro-batch; what PyTorch ran to accumulate."""
    experts = Experts(mesh["ep"], mode, checkpointed)
    under_fsdp = mesh.ndim == 2
    if under_fsdp:
        policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
        fully_shard(experts, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=reshard)
        accumulate_in(experts, torch.float32)
    elif dtype != torch.float32:
        experts.to(dtype)
        for param in experts.parameters():
            param.grad_dtype = torch.float32
    results, places, operators = {}, [[] for _ in range(STEPS)], []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            if under_fsdp:
                experts.set_is_last_backward(last)
                experts.set_requires_gradient_sync(last)
            (x, dy), counts = batch(dist.get_rank(), step, micro_batch)
            y = experts(x.to(dtype), counts)
            nodes, below = operators_under_accumulate_grad(lambda y=y, dy=dy: y.backward(dy.to(dtype)))
            assert nodes == 2
            operators += [name for name in below if name in ("aten::add", "aten::add_", "aten::copy_")]
            if under_fsdp and last:
                continue
            leaves = unsharded_params(experts._get_fsdp_state()) if under_fsdp else experts.parameters()
            places[step].append([leaf.grad._local_tensor.data_ptr() for leaf in leaves])
        grads = [p.grad.to_local() for p in (experts.fc1, experts.fc2)]
        if under_fsdp:  # of this rank's experts: parts of their gradients are on the ranks that share them
            grads = [_gathered(g, mesh["dp"]) for g in grads]
        assert all(g.dtype == torch.float32 for g in grads)
        results |= {f"fc{i + 1}, step {step}": g.double() for i, g in enumerate(grads)}
        experts.zero_grad()
    return results, places, operators


def _gathered(shard, mesh):
    parts = [torch.empty_like(shard) for _ in range(mesh.size())]
    dist.all_gather(parts, shard.contiguous(), group=mesh.get_group())
    return torch.cat(parts)


def cells(fsdp):
    """Messages by cell, the number of cells, and the additions and copies of PyTorch by mode, in float32."""
    shape, names = ((dist.get_world_size() // SHARDS, SHARDS), ("dp", "ep")) if fsdp else ((SHARDS,), ("ep",))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard = mesh.get_local_rank("ep")
    ranks = range(shard, dist.get_world_size(), SHARDS) if fsdp else [dist.get_rank()]
    dtypes = (torch.float32, torch.bfloat16)
    expected, *low = (plain_gradients(dtype, ranks, shard) for dtype in (torch.float64, *dtypes))
    failures, operators = {}, dict.fromkeys(MODES, 0)
    reshards = (False, True) if fsdp else (False,)
    every = list(itertools.product(MODES, zip(dtypes, low, strict=True), (False, True), reshards))
    for mode, (dtype, plain), checkpointed, reshard in every:
        found, places, ran = gradients(mesh, mode, dtype, checkpointed, reshard)
        if dtype == torch.float32:
            operators[mode] += len(ran)
        name = f"{mode} {dtype} checkpoint={checkpointed} reshard={reshard}"
        try:
            tolerance.assert_close(found, expected, plain, dtype)
            if mode != "off":
                assert all(place == of_step[0] for of_step in places for place in of_step), "a new .grad"
                assert ran == [], ran
        except AssertionError as error:
            failures[name] = str(error)
    return failures, len(every), operators
