"""Experts under Megatron-FSDP, in every sharding strategy, against float64 autograd. Runs in a `world`.

Its buffers, hooks and reductions are the real ones. It asks for GPUs by name, so that these are replaced: the device
type of its meshes, streams (on the CPU everything is in order), `Tensor.cuda` of small flags, and the check for a
version of TransformerEngine: that only says that its layers know `get_main_grad`, as ours do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.transformer.module import MegatronModule
from support.grids import part
from support.megatron_experts import Cell, Model, batch, config_of, expected_grads, reduced, weights_of
from support.tolerance import assert_close
from torch.utils.checkpoint import checkpoint

from fusedmlp.integrations.megatron import FusedGroupedMLP

LEARNING_RATE = 0.1
HAS_DTYPES = hasattr(DistributedDataParallelConfig, "megatron_fsdp_grad_comm_dtype")  # since 0.17


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
    """What Megatron-FSDP adds to the choices."""

    strategy: str = "optim_grads_params"
    unit: str = "experts"  # the module whose parameters are gathered and released together; "all": the whole model
    grad_comm_dtype: str = ""
    calculate_per_token_loss: bool = False  # sums over ranks instead of means
    recompute: str = ""  # "reentrant" or "non-reentrant": the experts run again in backward


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
if (
    not HAS_DTYPES
):  # after our step 0.16 has other weights than the reference, through plain autograd too: not understood
    STRATEGIES = STRATEGIES[:1]


def cells(world_size):
    """What decides where a gradient is kept, crossed; then other dtypes, gradients through autograd, recomputation."""
    for strategy, micro, ep in product(STRATEGIES, (1, 3), (False, True)[:world_size]):
        for dtype, fp32 in (("float32", True), ("bfloat16", False), ("bfloat16", True))[: 1 if micro == 1 else None]:
            yield FsdpCell(
                strategy=strategy,
                microbatches=micro,
                grad_reduce_in_fp32=fp32,
                dtype=dtype,
                expert_parallel=ep,
                unit="all" if fp32 else "experts",
                add_bias_linear=fp32,
                calculate_per_token_loss=scales_again(strategy, micro, ep),
            )
    for strategy in STRATEGIES:
        yield FsdpCell(strategy=strategy, microbatches=3, gradient_accumulation_fusion=False)
        if (
            HAS_DTYPES and world_size > 1
        ):  # on one rank Megatron-FSDP adds what it communicates in another dtype to itself
            yield FsdpCell(strategy=strategy, microbatches=3, dtype="bfloat16", grad_comm_dtype="bfloat16")
        for recompute in ("reentrant", "non-reentrant"):
            yield FsdpCell(strategy=strategy, microbatches=3, recompute=recompute)


def scales_again(strategy, microbatches, expert_parallel):
    """Whether Megatron-FSDP, however gradients come, scales those of earlier micro-batches with every one."""
    return strategy.startswith("optim_grads") and microbatches > 1 and expert_parallel


class Layer(MegatronModule):
    """Megatron-FSDP knows experts by ".experts." in their parameters' names."""

    def __init__(self, config, cell):
        super().__init__(config)
        self.mlp, self.recompute = Model(config, cell), cell.recompute

    def forward(self, x, probs):
        if not self.recompute:
            return self.mlp(x, probs)
        return checkpoint(self.mlp, x.requires_grad_(), probs, use_reentrant=self.recompute == "reentrant")


def wrap(config, cell, layer):
    dtypes = {"grad_reduce_in_fp32": cell.grad_reduce_in_fp32}
    if HAS_DTYPES:
        dtypes = {
            "megatron_fsdp_main_grads_dtype": torch.float32 if cell.grad_reduce_in_fp32 else None,
            "megatron_fsdp_grad_comm_dtype": getattr(torch, cell.grad_comm_dtype) if cell.grad_comm_dtype else None,
        }
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        data_parallel_sharding_strategy=cell.strategy,
        gradient_reduce_div_fusion=False,  # gloo cannot scale while it reduces
        **dtypes,
    )
    units = [{"experts": FusedGroupedMLP, "all": Layer}[cell.unit]]
    return mcore_fsdp_adapter.FullyShardedDataParallel(
        config, ddp_config, layer, fsdp_unit_modules=units, device=torch.device("cpu")
    )


def train_step(fsdp, cell):
    """As Megatron's schedules do: all micro-batches but the last under `no_sync`."""
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
    """The gradients that the optimizer gets, put together from every rank's shards, by name."""
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
        result[name.removeprefix("mlp.")] = full
    return result


def step(fsdp):
    """Plain gradient descent on every rank's shards; the next forward has to gather the weights."""
    for _, param in fsdp.param_and_grad_buffer.optimizer_named_parameters:
        if param.grad is not None:
            with torch.no_grad():
                param.to_local().sub_(LEARNING_RATE * param.grad.to_local())
    fsdp.module.install_optimized_model_weights()


def run_cell(cell):
    """Two steps, so that what the first leaves behind would show in the second."""
    torch.manual_seed(dist.get_rank() if cell.expert_parallel else 0)
    config = config_of(cell)
    config.calculate_per_token_loss = cell.calculate_per_token_loss
    layer = Layer(config, cell)
    model = layer.mlp
    with torch.no_grad():
        dist.broadcast(model.dense.weight, 0)
    main, dtype = {name: w.float() for name, w in weights_of(model).items()}, getattr(torch, cell.dtype)
    experts = {f"experts.{name}" for name, _ in model.experts.named_parameters()}
    fsdp = wrap(config, cell, layer)
    for _ in range(2):
        train_step(fsdp, cell)
        weights = {name: w.to(dtype) for name, w in main.items()}
        want, low = (reduced(expected_grads(weights, cell, d), experts, cell) for d in (torch.float64, dtype))
        got = landed(fsdp, cell)
        if cell.calculate_per_token_loss:
            got = {name: grad / dist.get_world_size() for name, grad in got.items()}
        assert_close({name: grad.double() for name, grad in got.items()}, want, low, dtype)
        scale = LEARNING_RATE * (dist.get_world_size() if cell.calculate_per_token_loss else 1)
        step(fsdp)
        main = {name: w - scale * got[name] for name, w in main.items()}


def run_all(quick):
    """The cells that were run, what was wrong with which, and what is refused."""
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN: buffers are stale
    failures, count, every = {}, 0, list(cells(dist.get_world_size()))
    every = part(every, together=1) if quick else every
    for expert_parallel in (False, True):
        chosen = [c for c in every if c.expert_parallel == expert_parallel]
        if not chosen:
            continue
        megatron_world.model_parallel(expert_model_parallel_size=2 if expert_parallel else 1)
        for cell in chosen:
            count += 1
            try:
                run_cell(cell)
            except Exception as error:
                failures[str(cell)] = f"{type(error).__name__}: {error}"[:500]
    return count, failures, refusals()


def refusals():
    """What is raised where Megatron-FSDP would make a wrong gradient of a right one."""
    megatron_world.model_parallel(expert_model_parallel_size=dist.get_world_size())
    found = {}
    for strategy in ("optim_grads", "optim_grads_params") if dist.get_world_size() == 2 else ():
        try:
            run_cell(FsdpCell(microbatches=3, expert_parallel=True, strategy=strategy))
        except RuntimeError as error:
            found[f"scaled again, {strategy}"] = str(error)
    cell = FsdpCell(order="bw")
    config = config_of(cell)
    try:
        train_step(wrap(config, cell, Layer(config, cell)), cell)
    except RuntimeError as error:
        found["delayed"] = str(error)
    return found
