"""Experts under Megatron-FSDP, in every sharding strategy, against float64 autograd. Runs in a `world`.

Its buffers, hooks and reductions are the real ones. It asks for GPUs by name, so these are replaced: the device type
of its meshes, streams (on the CPU everything is in order), `Tensor.cuda` of small flags, and the check of
TransformerEngine's version, which stands for layers that know `get_main_grad`, as ours do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from unittest import mock

import pytest
import support.megatron_world  # noqa: F401  before Megatron asks for a GPU
import torch
import torch.distributed as dist
from megatron.core import package_info, parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.transformer.module import MegatronModule
from support.eight_bit import magnitudes
from support.grids import part
from support.megatron_experts import Cell, Model, batch, config_of, expected_grads, reduced, run_cells, weights_of
from torch.utils.checkpoint import checkpoint

from bench.oracle.tolerance import assert_close
from fusedmlp.contract.destinations import megatron_fsdp
from fusedmlp.integrations.megatron import FusedGroupedMLP

LEARNING_RATE = 0.1
VERSION = package_info.VERSION[:2]


class _CpuMesh:
    @staticmethod
    def from_group(groups, device_type, **options):
        return dist.DeviceMesh.from_group(groups, device_type="cpu", **options)


torch.cuda.current_device = lambda: 0
torch.cuda.empty_cache = lambda: None
torch.Tensor.cuda = lambda tensor, *_, **__: tensor
mcore_fsdp_adapter.DeviceMesh = _CpuMesh
mcore_fsdp_adapter.is_te_min_version = lambda *_, **__: True


@dataclass(frozen=True)
class FsdpCell(Cell):
    """A cell with the choices that Megatron-FSDP adds."""

    strategy: str = "optim_grads_params"
    unit: str = "experts"  # gathers and releases its parameters together: "experts", "layer" or "model"
    grad_comm_dtype: str = ""
    calculate_per_token_loss: bool = False  # sums over ranks instead of means
    recompute: str = ""  # "reentrant" or "non-reentrant": the experts run again in backward
    meta: bool = False  # experts begin on the meta device, and Megatron-FSDP fills them


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NEVER_GATHERED = "fsdp_unit_modules: expected modules that run their hooks"
NO_STORAGE = "out of bounds for storage of size 0"  # PyTorch's error, in the dense layer before the experts
ADDED_TO_OWN = "megatron_fsdp_grad_comm_dtype: expected None or torch.float32, .* with {0.strategy} where"
SCALED_AGAIN = "expected no_shard or optim, one micro-batch, or calculate_per_token_loss, .* got {0.strategy}, under"


def cells(world_size):
    """All combinations of what decides where a gradient is kept. Then the meta device, no fusion, recomputation, other
    dtypes, the whole model as one unit, and gradients that are scaled again."""
    for strategy, micro, ep in product(STRATEGIES, (1, 3), (False, True)[:world_size]):
        for dtype, fp32 in (("float32", True), ("bfloat16", False), ("bfloat16", True))[: 1 if micro == 1 else None]:
            yield FsdpCell(
                strategy=strategy,
                microbatches=micro,
                grad_reduce_in_fp32=fp32,
                dtype=dtype,
                expert_parallel=ep,
                unit="layer" if fp32 else "experts",
                add_bias_linear=fp32,
                calculate_per_token_loss=scales_again(strategy, micro, ep),
            )
    for strategy, bias in (("optim", True), ("optim_grads", False), ("optim_grads_params", True)):
        yield FsdpCell(strategy=strategy, meta=True, add_bias_linear=bias)
    if world_size > 1:
        yield FsdpCell(meta=True, expert_parallel=True)
    for strategy in STRATEGIES:
        yield FsdpCell(strategy=strategy, microbatches=3, gradient_accumulation_fusion=False)
        for recompute in ("reentrant", "non-reentrant"):
            yield FsdpCell(strategy=strategy, microbatches=3, recompute=recompute)
        for ep in (False, True)[:world_size]:
            other = {"dtype": "bfloat16", "grad_comm_dtype": "bfloat16"}
            yield FsdpCell(strategy=strategy, microbatches=3, expert_parallel=ep, **other)
            if strategy != "no_shard":
                yield FsdpCell(strategy=strategy, expert_parallel=ep, unit="model")
            if scales_again(strategy, 3, ep):
                yield FsdpCell(strategy=strategy, expert_parallel=ep, microbatches=3)


def scales_again(strategy, microbatches, expert_parallel):
    """Whether Megatron-FSDP scales the sum of earlier micro-batches again with every one, also of plain gradients."""
    return strategy.startswith("optim_grads") and microbatches > 1 and expert_parallel


def refusal(cell):
    """The error of a cell in which this version of Megatron-FSDP makes gradients wrong; None: they are right."""
    if cell.strategy == "no_shard":
        return None
    if cell.unit == "model" and VERSION < (0, 19):
        released = cell.strategy == "optim_grads_params" and dist.get_world_size() > 1
        return NO_STORAGE if released else NEVER_GATHERED
    grads_are_sharded = cell.strategy != "optim" and not cell.expert_parallel and dist.get_world_size() > 1
    if cell.grad_comm_dtype and cell.strategy != "optim" and not grads_are_sharded:
        return ADDED_TO_OWN
    if scales_again(cell.strategy, cell.microbatches, cell.expert_parallel) and not cell.calculate_per_token_loss:
        return SCALED_AGAIN
    return None


class Layer(MegatronModule):
    """A layer inside a model, as Megatron's are; Megatron-FSDP finds its experts by ".experts." in names."""

    def __init__(self, config, cell):
        super().__init__(config)
        self.mlp, self.recompute = Model(config, cell), cell.recompute

    def forward(self, x, probs):
        if not self.recompute:
            return self.mlp(x, probs)
        return checkpoint(self.mlp, x.requires_grad_(), probs, use_reentrant=self.recompute == "reentrant")


class Layers(MegatronModule):
    """A model of one layer."""

    def __init__(self, config, cell):
        super().__init__(config)
        self.layer = Layer(config, cell)

    def forward(self, x, probs):
        return self.layer(x, probs)


def wrap(config, cell, model):
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        data_parallel_sharding_strategy=cell.strategy,
        gradient_reduce_div_fusion=False,  # gloo cannot scale while it reduces
        megatron_fsdp_main_grads_dtype=torch.float32 if cell.grad_reduce_in_fp32 else None,
        megatron_fsdp_grad_comm_dtype=getattr(torch, cell.grad_comm_dtype) if cell.grad_comm_dtype else None,
    )
    units = [{"experts": FusedGroupedMLP, "layer": Layer, "model": Layers}[cell.unit]]
    return mcore_fsdp_adapter.FullyShardedDataParallel(
        config, ddp_config, model, fsdp_unit_modules=units, device=torch.device("cpu")
    )


def train_step(fsdp, cell):
    """Run a step as Megatron's schedules do: all micro-batches but the last under `no_sync`."""
    fsdp.zero_grad_buffer()

    def run(index):
        x, probs, dy = batch(cell, index, dist.get_rank())
        fsdp(x, probs).backward(dy)

    with fsdp.no_sync():
        for index in range(cell.microbatches - 1):
            run(index)
    run(cell.microbatches - 1)
    fsdp.finish_grad_sync()


def landed(fsdp, cell):
    """The gradients that the optimizer gets, assembled from all ranks' shards, by name."""
    result = {}
    for name, param in fsdp.param_and_grad_buffer.optimizer_named_parameters:
        original = param.orig_param
        full = torch.zeros(param.shape, dtype=param.dtype)
        here = getattr(param, "megatron_fsdp_slice", slice(None))
        if param.grad is not None:
            full.view(-1)[here] = param.grad.to_local().flatten()
        if cell.strategy != "no_shard":
            of_expert = not getattr(original, "allreduce", True)
            group = (
                parallel_state.get_expert_data_parallel_group()
                if of_expert
                else parallel_state.get_data_parallel_group()
            )
            dist.all_reduce(full, group=group)
        result[name.removeprefix("layer.mlp.")] = full
    return result


def step(fsdp):
    """Plain gradient descent on every rank's shards; the next forward has to gather the weights."""
    for _, param in fsdp.param_and_grad_buffer.optimizer_named_parameters:
        if param.grad is not None:
            with torch.no_grad():
                param.to_local().sub_(LEARNING_RATE * param.grad.to_local())
    fsdp.module.install_optimized_model_weights()


def steps(cell, config):
    """Train two steps, as leftovers of the first would show in the second: yield the weights before, and gradients."""
    config.calculate_per_token_loss = cell.calculate_per_token_loss
    ranks = dist.get_world_size() if cell.calculate_per_token_loss else 1  # that are summed, not averaged

    def build():
        torch.manual_seed(dist.get_rank() if cell.expert_parallel else 0)
        layers, generator = Layers(config, cell), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in [param for param in layers.parameters() if param.dim() > 1 and not param.is_meta]:
                weight.mul_(magnitudes(weight.shape, cell.spread, generator))
            dist.broadcast(layers.layer.mlp.dense.weight, 0)
        return layers

    layers = build()
    weights = {name: w.float() for name, w in weights_of(layers.layer.mlp).items()}
    if cell.meta:  # the same seed must give the same weights
        config.use_cpu_initialization, config.init_model_with_meta_device = False, True
        layers = build()
        assert {param.device.type for param in layers.layer.mlp.experts.parameters()} == {"meta"}
    fsdp = wrap(config, cell, layers)
    for _ in range(2):
        fsdp.set_is_first_microbatch()
        train_step(fsdp, cell)
        grads = {name: grad / ranks for name, grad in landed(fsdp, cell).items()}
        yield weights, grads
        step(fsdp)
        weights = {name: w - LEARNING_RATE * ranks * grads[name] for name, w in weights.items()}


def run_cell(cell):
    """Compare the gradients of both steps with float64 autograd."""
    dtype = getattr(torch, cell.dtype)
    for weights, got in steps(cell, config_of(cell)):
        experts = {name for name in weights if name.startswith("experts.")}
        rounded = {name: w.to(dtype) for name, w in weights.items()}
        want, low = (reduced(expected_grads(rounded, cell, d), experts, cell) for d in (torch.float64, dtype))
        assert_close({name: grad.double() for name, grad in got.items()}, want, low, dtype)


def check_refused(cell, words):
    """Assert that a cell is refused, and that its gradients would be wrong without the refusal."""
    with pytest.raises(RuntimeError, match=words.format(cell)):
        run_cell(cell)
    if words == NO_STORAGE or (words == NEVER_GATHERED and dist.get_world_size() == 1):
        return  # not our refusal; or a single rank, which has all weights
    with (
        mock.patch.object(megatron_fsdp, "refuse_wrong_gradients", return_value=None),
        pytest.raises(AssertionError, match=r"not finite|error .* allowed"),
    ):
        run_cell(cell)


def run_all(quick):
    """Counts of all cells and of those that are refused; errors by cell; the message that refuses a delay."""
    every = list(cells(dist.get_world_size()))
    every = part(every, together=1) if quick else every
    words = {cell: refusal(cell) for cell in every}
    run = lambda cell: run_cell(cell) if words[cell] is None else check_refused(cell, words[cell])  # noqa: E731
    count, failures = run_cells(every, run)
    counts = {"cells": count, "refused": sum(words[cell] is not None for cell in every)}
    return counts, failures, refusal_of_a_delay()


def refusal_of_a_delay():
    """The message that refuses delayed weight gradients."""
    cell = FsdpCell(order="bw")
    config = config_of(cell)
    with pytest.raises(RuntimeError) as refused:
        train_step(wrap(config, cell, Layers(config, cell)), cell)
    return str(refused.value)
