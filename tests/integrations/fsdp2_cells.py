"""Experts under FSDP2 (`fully_shard`), against float64 in one process on the data of all ranks.

Every rank runs `cells`, on the micro-batches of support/small_moe.py.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support.grids import part
from support.small_moe import EXPERTS, H, batch, initial, plain_output, stacked
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fusedmlp
from bench.oracle import tolerance
from fusedmlp.integrations import fsdp2

MICRO_BATCHES, STEPS, MAX_NORM = 3, 2, 0.2


def plain_training(dtype, world_size):
    """Gradients of every step (averaged over ranks, clipped) and the parameters at the end, computed in `dtype`.

    The sum over micro-batches and the optimizer are in float64 for `dtype=float64`, else in float32.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    params = {name: nn.Parameter(p.detach().to(wide)) for name, p in initial(True).named_parameters()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    results = {}
    for step in range(STEPS):
        for param in params.values():
            param.grad = torch.zeros_like(param)
        for rank, micro_batch in itertools.product(range(world_size), range(MICRO_BATCHES)):
            x, counts, probs, dy = batch(rank, step, micro_batch)
            low = {name: p.to(dtype) for name, p in params.items()}
            y = plain_output(low, x.to(dtype), counts, probs.to(dtype))
            y.backward(dy[: sum(counts)].to(dtype) / world_size)
        nn.utils.clip_grad_norm_(params.values(), MAX_NORM)
        results |= {f"{name}, gradient of step {step}": p.grad.clone() for name, p in params.items()}
        optimizer.step()
    return {name: t.detach().double() for name, t in (results | params).items()}


@dataclass(frozen=True)
class Cell:
    packed: bool
    accumulate: str
    precision: str  # "fp32", "bf16", "bf16, fp32 grads"
    reshard: bool
    checkpointed: bool
    groups: str  # of FSDP2, beside that of the rest of the model: "none", "experts", or "fc1, fc2"

    @property
    def name(self):
        return (
            f"{'packed' if self.packed else 'per expert'} {self.accumulate} {self.precision} reshard={self.reshard} "
            f"checkpoint={self.checkpointed} groups={self.groups}"
        )


def shard(model, precision, reshard, groups):
    policy = MixedPrecisionPolicy()
    if precision != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
        )
    for name in () if groups == "none" else groups.split(", "):
        owner = model.experts if groups == "experts" else getattr(model.experts, name)
        fully_shard(owner, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    if precision == "bf16, fp32 grads":
        fsdp2.accumulate_in(model)
    return model


def unsharded_grads(model):
    """`.grad` of the unsharded parameters, by name: sums that wait for the last micro-batch."""
    return {
        p._param_fqn or p._module_info.param_name: p._unsharded_param.grad
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for p in module._get_fsdp_state()._fsdp_param_group.fsdp_params
    }


def train(cell):
    """The results of `plain_training` by FSDP2, and messages about errors on the way."""
    model = initial(cell.packed, cell.accumulate, checkpointed=cell.checkpointed)
    shard(model, cell.precision, cell.reshard, cell.groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results, wrong = {}, []
    low = torch.bfloat16 if "bf16" in cell.precision else torch.float32
    for step in range(STEPS):
        held = {}
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            x, counts, probs, dy = batch(dist.get_rank(), step, micro_batch)
            model(x, counts, probs).backward(dy.to(low))
            if last or cell.precision == "bf16":  # in bf16 FSDP2 keeps sums in another place
                continue
            waiting = {name: g for name, g in unsharded_grads(model).items() if "weight" in name and "fc" in name}
            assert len(waiting) == (2 if cell.packed else 2 * EXPERTS)
            for name, grad in waiting.items():
                if grad is None:
                    wrong.append(f"{name}: None after micro-batch {micro_batch}")
                elif grad.dtype != torch.float32:
                    wrong.append(f"{name}: {grad.dtype}")
                elif cell.accumulate != "off" and held.setdefault(name, grad.data_ptr()) != grad.data_ptr():
                    wrong.append(f"{name}: a new .grad in micro-batch {micro_batch}")
        if not all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters()):
            wrong.append("a sharded gradient is missing, or not fp32")
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results |= {f"{name}, gradient of step {step}": g for name, g in stacked(grads, cell.packed).items()}
        optimizer.step()
        optimizer.zero_grad()
    final = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return {name: t.double() for name, t in (results | stacked(final, cell.packed)).items()}, wrong


def all_cells():
    precisions = ["fp32", "bf16", "bf16, fp32 grads"]
    for packed, accumulate, precision, reshard in itertools.product(
        [True, False], ["off", "grad", "auto"], precisions, [True, False]
    ):
        if accumulate != "auto" or reshard:
            yield Cell(
                packed, accumulate, precision, reshard, checkpointed=False, groups="experts" if packed else "none"
            )
    for packed, accumulate in itertools.product([True, False], ["off", "grad"]):
        yield Cell(packed, accumulate, "bf16, fp32 grads", True, checkpointed=True, groups="experts")
    for packed, precision in itertools.product([True, False], ["fp32", "bf16, fp32 grads"]):
        yield Cell(packed, "auto", precision, reshard=False, checkpointed=False, groups="fc1, fc2")


def cells(quick):
    """Names of the cells that ran, and messages by cell."""
    expected = plain_training(torch.float64, dist.get_world_size())
    low = {dtype: plain_training(dtype, dist.get_world_size()) for dtype in (torch.float32, torch.bfloat16)}
    names, failures = [], {}
    every = list(all_cells())
    for cell in part(every) if quick else every:
        names.append(cell.name)
        dtype = torch.bfloat16 if "bf16" in cell.precision else torch.float32
        actual, wrong = train(cell)
        try:
            tolerance.assert_close(actual, expected, low[dtype], dtype)
        except AssertionError as error:
            wrong.append(str(error))
        if wrong:
            failures[cell.name] = wrong
    return names, failures


def kept_copies():
    """Experts after training in 16 and 8 bits, whose weights are cast or quantized once a step, while they stay
    gathered ("once"), or for every use: `{recipe: {name: numbers}}`.

    FSDP2 may gather the weights of a new step to the addresses of the old one, and keeps their versions.
    """
    results = {"bf16": {}, "mxfp8": {}}
    ways = [("for every use", True), ("for every use", False), ("once", False)]
    for recipe, (how, reshard) in itertools.product(results, ways):
        torch.manual_seed(3)
        experts = fusedmlp.GroupedMLP(2, 64, 32, recipe=recipe, accumulate_wgrad="grad")
        fully_shard(experts, reshard_after_forward=reshard)
        optimizer, held = torch.optim.SGD(experts.parameters(), lr=0.5), None
        for step, micro_batch in itertools.product(range(STEPS), range(MICRO_BATCHES)):
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + 10 * step + micro_batch)
            x, dy = torch.randn(160, 64, generator=generator), torch.randn(160, 64, generator=generator)
            if how == "once":
                experts.set_reshard_after_backward(micro_batch == MICRO_BATCHES - 1)
                if micro_batch == 0:
                    experts.unshard()
                    held = experts.quantize_weights()
            experts(x, [90, 61], quantized_weights=held).backward(dy)
            if micro_batch == MICRO_BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
        numbers = [p.detach().full_tensor().tolist() for p in experts.parameters()]
        results[recipe][f"{how}, reshard={reshard}"] = numbers
    return results


def compiled():
    """Return the relative distance of gradients of compiled experts from those of the same experts outside of graphs,
    by case: `accumulate_in`, micro-batches of the same and of other sizes, blocks compiled as torchtitan does.
    """

    def gradients(packed, rows, options):
        torch._dynamo.reset()
        model = initial(packed, "auto")
        if options is not None:
            model.experts.compile(backend="aot_eager", **options)
        shard(model, "bf16, fp32 grads", True, "experts")
        for i, count in enumerate(rows):
            model.set_is_last_backward(i == len(rows) - 1)
            model.set_requires_gradient_sync(i == len(rows) - 1)
            generator = torch.Generator().manual_seed(10 * dist.get_rank() + i)
            x, probs = torch.randn(count, H, generator=generator), torch.rand(count, generator=generator)
            model(x, torch.tensor([2, 0, count - 2]), probs).float().square().sum().backward()
        return torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])

    cases = {  # no number of rows is H, or Dynamo would take both for one size
        "sizes differ, packed": (True, (7, 8, 9), {}),
        "fullgraph, packed": (True, (7, 7, 7), {"fullgraph": True}),
        "fullgraph, sizes differ, dynamic": (False, (7, 8, 9), {"fullgraph": True, "dynamic": True}),
    }
    results = {}
    for case, (packed, rows, options) in cases.items():
        actual, expected = gradients(packed, rows, options), gradients(packed, rows, None)
        results[case] = ((actual - expected).norm() / expected.norm()).item()
    return results


def refusals():
    """The error of each use; None where nothing was raised."""

    def message(function):
        try:
            function()
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error)
        return None

    def run(model):
        x, counts, probs, dy = batch(0, 0, 0)
        model(x, counts, probs).backward(dy)

    def attach(module, args):
        for param in module.experts.parameters():
            param.main_grad = torch.zeros(param.shape)

    def with_main_grad(accumulate):
        model = shard(initial(True, accumulate), "fp32", True, "none")
        model.register_forward_pre_hook(attach)
        run(model)

    def buffer_after(**options):
        fusedmlp.MainGradBuffer(shard(initial(True, "auto", **options), "fp32", True, "none").parameters())

    def partly():
        model = initial(True)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fsdp2.accumulate_in(fully_shard(model, mp_policy=policy))

    return {
        "main_grad": message(lambda: run(shard(initial(True, "main_grad"), "fp32", True, "experts"))),
        "main_grad, attached to gathered parameters": message(lambda: with_main_grad("main_grad")),
        "auto, attached to gathered parameters": message(lambda: with_main_grad("auto")),
        "delayed, main_grad": message(
            lambda: run(shard(initial(True, "main_grad", delay=True), "fp32", True, "experts"))
        ),
        "delayed, .grad": message(lambda: run(shard(initial(False, "off", delay=True), "fp32", True, "none"))),
        "buffer": message(buffer_after),
        "delayed, buffer": message(lambda: buffer_after(delay=True)),
        "accumulate_in without fully_shard": message(lambda: fsdp2.accumulate_in(initial(True))),
        "accumulate_in of parameters": message(lambda: fsdp2.accumulate_in(initial(True).parameters())),
        "accumulate_in, reduced in bf16": message(partly),
        "fc1 by itself, freed after its forward": message(lambda: run(shard(initial(True), "fp32", True, "fc1"))),
        "a copy is not gathered": message(lambda: run(copy.deepcopy(initial(True, "auto", delay=True)))),
    }
