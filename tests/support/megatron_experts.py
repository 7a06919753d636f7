"""Experts under Megatron's own DDP, in every configuration, against float64 autograd. Runs in a `world`."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import pytest
import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from support.eight_bit import magnitudes
from support.grids import part

from bench.oracle import reference
from bench.oracle.tolerance import assert_close
from fusedmlp.contract import dummy
from fusedmlp.contract.destinations import main_grad
from fusedmlp.integrations.megatron import FusedGroupedMLP


@dataclass(frozen=True)
class Cell:
    """One configuration; the name of each field is what Megatron calls it, where it has a name."""

    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    grad_reduce_in_fp32: bool = True
    zero_out_wgrad: bool = False
    microbatches: int = 1
    expert_parallel: bool = False
    gradient_accumulation_fusion: bool = True
    add_bias_linear: bool = False
    dtype: str = "float32"
    order: str = ""  # of backward (b) and backward_dw (w); "": not delayed
    fuse_microbatches: bool = False
    overlap_param_gather: bool = False
    moe_single_grouped: bool = False  # one weight and one bias for all experts

    # Odd sizes: the views of Megatron's buffers are not aligned.
    hidden: ClassVar[int] = 7
    ffn: ClassVar[int] = 5
    counts: ClassVar[tuple[int, ...]] = (4, 0, 3)
    spread: ClassVar[int] = 0  # of magnitudes; see `support/eight_bit.py`

    def __str__(self):
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(type(self)(), k)]
        return ",".join(changed) or "default"


def cells(world_size):
    """All fields but those of delays crossed with each other, then delays."""
    flags = (False, True)
    for overlap, sharded, fp32, zero_out, micro, ep in itertools.product(flags, flags, flags, flags, (1, 3), flags):
        if ep and world_size == 1:
            continue
        for dtype in ("float32", "bfloat16"):
            yield Cell(overlap, sharded, fp32, zero_out, micro, ep, dtype=dtype, add_bias_linear=zero_out)
    for overlap, sharded, fusion in itertools.product(flags, flags, flags):
        for order, fuse in (
            ("bw", False),
            ("bwbw", False),
            ("bbww", False),
            ("bbww", True),
            ("bbwbww", False),
            ("bwbw", True),
        ):
            yield Cell(
                overlap,
                sharded,
                microbatches=order.count("b"),
                gradient_accumulation_fusion=fusion,
                order=order,
                fuse_microbatches=fuse,
                add_bias_linear=sharded,
            )
        yield Cell(overlap, sharded, microbatches=3, gradient_accumulation_fusion=fusion)
    for order in ("", "bbww"):
        yield Cell(
            overlap_grad_reduce=True,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            microbatches=order.count("b") or 1,
            order=order,
        )

    for sharded, (order, fuse), ep in itertools.product(flags, (("", False), ("bbww", False), ("bbww", True)), flags):
        if ep and world_size == 1:
            continue
        yield Cell(
            overlap_grad_reduce=sharded,
            use_distributed_optimizer=sharded,
            expert_parallel=ep,
            microbatches=order.count("b") or 3,
            order=order,
            fuse_microbatches=fuse,
            add_bias_linear=True,
            dtype="bfloat16" if ep else "float32",
            moe_single_grouped=True,
        )


class Model(MegatronModule):
    """A dense layer, then the experts: Megatron keeps their gradients in different buffers."""

    def __init__(self, config, cell):
        super().__init__(config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.counts = cell.counts
        self.dense = torch.nn.Linear(cell.hidden, cell.hidden, bias=False, dtype=config.params_dtype)
        self.experts = FusedGroupedMLP(len(cell.counts), config, None, groups, fuse_microbatches=cell.fuse_microbatches)
        if cell.zero_out_wgrad:
            for name, param in self.experts.named_parameters():
                param.zero_out_wgrad = "weight" in name

    def forward(self, x, probs):
        return self.experts(self.dense(x), torch.tensor(self.counts), probs)[0]


def config_of(cell):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=cell.hidden,
        num_attention_heads=1,
        num_moe_experts=len(cell.counts) * (2 if cell.expert_parallel else 1),
        moe_ffn_hidden_size=cell.ffn,
        expert_model_parallel_size=2 if cell.expert_parallel else 1,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=cell.add_bias_linear,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        params_dtype=getattr(torch, cell.dtype),
        bf16=cell.dtype == "bfloat16",
        pipeline_dtype=getattr(torch, cell.dtype),
    )
    # Set after construction, which would require a GPU or TransformerEngine for these.
    config.gradient_accumulation_fusion = cell.gradient_accumulation_fusion
    config.delay_wgrad_compute = bool(cell.order)
    config.moe_single_grouped_weight = config.moe_single_grouped_bias = cell.moe_single_grouped
    return config


def batch(cell, index, rank):
    generator = torch.Generator().manual_seed(100 * rank + index)
    dtype, shape = getattr(torch, cell.dtype), (sum(cell.counts), cell.hidden)
    x, dy = (
        (torch.randn(shape, generator=generator) * magnitudes(shape, cell.spread, generator)).to(dtype)
        for _ in range(2)
    )
    return x, torch.rand(len(x), generator=generator), dy


def one_by_one(tensors):
    """The tensors by the names of separate experts, also where one parameter has all experts."""
    return {
        f"{name}{e}": part
        for name, tensor in tensors.items()
        for e, part in (enumerate(tensor) if name.endswith(("weight", "bias")) and "fc" in name else [("", tensor)])
    }


def weights_of(model):
    """Copies of the weights, by name; see `one_by_one`."""
    return one_by_one({name: p.detach().clone() for name, p in model.named_parameters()})


def expected_grads(weights, cell, dtype=torch.float64):
    """Gradients by parameter name: plain autograd over this rank's micro-batches, experts in a loop."""
    params = {name: p.to(dtype, copy=True).requires_grad_() for name, p in weights.items()}
    for index in range(cell.microbatches):
        x, probs, dy = (t.to(dtype) for t in batch(cell, index, dist.get_rank()))
        fc1, fc2, bias1, bias2 = (
            [params.get(f"experts.linear_{name}{e}") for e in range(len(cell.counts))]
            for name in ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")
        )
        reference.rows(x @ params["dense.weight"].T, fc1, fc2, cell.counts, probs, bias1, bias2).backward(dy)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}


def reduced(grads, names_of_experts, cell):
    """The mean over data-parallel ranks, as Megatron's DDP makes it; experts of expert parallelism are not shared."""
    world_size = dist.get_world_size()
    for name, grad in grads.items():
        if not (cell.expert_parallel and name in names_of_experts):
            dist.all_reduce(grad)
        grad /= world_size
    return grads


def train_step(model, ddp, cell):
    """Run micro-batches in the cell's order of backward and backward_dw; synchronise gradients at the last."""
    ddp.zero_grad_buffer()
    order = cell.order or "b" * cell.microbatches
    done = {"b": 0, "w": 0}
    for letter in order:
        index = done[letter]
        done[letter] += 1
        last = index == cell.microbatches - 1
        with nullcontext() if last else ddp.no_sync():
            if letter == "w":
                model.experts.backward_dw()
            else:
                x, probs, dy = batch(cell, index, dist.get_rank())
                weights = [
                    w for linear in (model.experts.linear_fc1, model.experts.linear_fc2) for w in linear.group("weight")
                ]
                before = [w.main_grad.clone() for w in weights]
                ddp(x, probs).backward(dy)
                if cell.order:
                    assert all(torch.equal(w.main_grad, b) for w, b in zip(weights, before, strict=True)), "not delayed"
    ddp.finish_grad_sync()


def owned_by_this_rank(buffer):
    """A mask of the elements of one of DDP's buffers: all, unless the distributed optimizer divides them."""
    if not buffer.ddp_config.use_distributed_optimizer:
        return torch.ones_like(buffer.grad_data, dtype=torch.bool)
    owned = torch.zeros_like(buffer.grad_data, dtype=torch.bool)
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // buffer.data_parallel_group.size()
        first = bucket.offset + size * buffer.data_parallel_group.rank()
        owned[first : first + size] = True
    return owned


def forget_what_others_own(ddp):
    """Invalidate other ranks' weights, as after an optimizer's step: the next forward must gather them."""
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        buffer.param_data[~owned_by_this_rank(buffer)] = torch.nan
    for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
        group.param_gather_dispatched = False


def landed(ddp, model, want):
    """Every gradient as DDP's buffers have it; elements that another rank owns after it are those of `want`."""
    names = {p: name for name, p in model.named_parameters()}
    result = {}
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        got, owned = buffer.grad_data.double(), owned_by_this_rank(buffer)
        for param in buffer.params:
            start = param.main_grad.storage_offset() - buffer.grad_data.storage_offset()
            here = slice(start, start + param.numel())
            name = names[param]
            wanted = want[name] if name in want else torch.stack([want[f"{name}{e}"] for e in range(len(param))])
            result[name] = torch.where(owned[here], got[here], wanted.flatten()).view(param.shape)
    return one_by_one(result)


def check(cell, ddp, model, weights, experts):
    """Compare gradients with float64 autograd."""
    dtype = getattr(torch, cell.dtype)
    want, low = (reduced(expected_grads(weights, cell, d), experts, cell) for d in (torch.float64, dtype))
    assert_close(landed(ddp, model, want), want, low, dtype)


def together(check, *arguments):
    """Run a check; raise where it fails on any rank, as a rank that failed alone would leave the others waiting."""
    said, every = None, [None] * dist.get_world_size()
    try:
        check(*arguments)
    except AssertionError as error:
        said = str(error)
    dist.all_gather_object(every, said)
    if any(every):
        raise AssertionError(every)


def run_cell(cell, config, check=check):
    """Two steps, so that state that the first leaves behind would show in the second."""
    torch.manual_seed(dist.get_rank() if cell.expert_parallel else 0)
    model = Model(config, cell)
    with torch.no_grad():
        for weight in [param for param in model.parameters() if param.dim() > 1]:
            weight.mul_(magnitudes(weight.shape, cell.spread))
        dist.broadcast(model.dense.weight, 0)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=cell.grad_reduce_in_fp32,
        overlap_grad_reduce=cell.overlap_grad_reduce,
        use_distributed_optimizer=cell.use_distributed_optimizer,
        delay_wgrad_compute=bool(cell.order),
        overlap_param_gather=cell.overlap_param_gather,
        bucket_size=20 if cell.overlap_param_gather else None,  # several buckets, gathered one after the other
    )
    ddp = DistributedDataParallel(config, ddp_config, model)
    weights = weights_of(model)
    experts = {name for name in weights if name.startswith("experts.")}
    for _ in range(2):
        train_step(model, ddp, cell)
        together(check, cell, ddp, model, weights, experts)
        assert all(p.grad is None for p in model.parameters())
        if cell.overlap_param_gather:
            forget_what_others_own(ddp)


def run_cells(every, run):
    """The number of cells that were run, and the failure of each that failed."""
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN: a dummy must hold zeros
    failures, count = {}, 0
    for expert_parallel in (False, True):
        chosen = [c for c in every if c.expert_parallel == expert_parallel]
        if not chosen:
            continue
        megatron_world.model_parallel(expert_model_parallel_size=2 if expert_parallel else 1)
        for cell in chosen:
            count += 1
            try:
                run(cell)
            except (Exception, pytest.fail.Exception) as error:
                failures[str(cell)] = f"{type(error).__name__}: {error}"[:500]
    return count, failures


def run_all(quick):
    """`run_cells` of all cells, or of a part."""
    every = list(cells(dist.get_world_size()))
    return run_cells(part(every) if quick else every, lambda cell: run_cell(cell, config_of(cell)))


def sabotage():
    """The effects on Megatron's DDP of mistakes that our module does not make: largest errors, or the message."""
    megatron_world.model_parallel()
    cell = Cell(overlap_grad_reduce=True, microbatches=2)
    found = {}
    for what in ("a returned gradient after a fused one", "a dummy that is not zero", "no dummy"):
        found[what] = {}
        for who in ("ours", "sabotaged"):
            torch.manual_seed(0)
            config = config_of(cell)
            model = Model(config, cell)
            ddp = DistributedDataParallel(config, DistributedDataParallelConfig(True, overlap_grad_reduce=True), model)
            with _sabotaged(what, model) if who == "sabotaged" else nullcontext():
                try:
                    train_step(model, ddp, cell)
                except AssertionError as error:
                    found[what] = str(error)
                    break
            want = expected_grads(weights_of(model), cell)
            got = landed(ddp, model, want)
            found[what][who] = max(float((got[name] - want[name]).abs().max()) for name in want)
    return found


def _sabotaged(what, model):
    if what == "no dummy":
        return mock.patch.object(main_grad, "set_dummy_wgrad")
    if what == "a dummy that is not zero":
        for param in model.experts.parameters():
            param.zero_out_wgrad = True
        return mock.patch.object(dummy, "_new_dummy", torch.ones_like)
    # The second micro-batch goes through plain autograd; Megatron's flag, set by the first, would drop its gradient.
    calls = []
    forward = model.experts.forward

    def alternate(*args):
        calls.append(args)
        model.config.gradient_accumulation_fusion = len(calls) == 1
        return forward(*args)

    return mock.patch.object(model.experts, "forward", alternate)
