"""Checkpoints of Megatron's distributed optimizer, by format. Runs in a `world`."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product
from unittest import mock

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
import torch.distributed as dist
from integrations.megatron_layers import raised, shared_folder
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from support.megatron_experts import Cell, Model, config_of, train_step
from torch.overrides import TorchFunctionMode

FORMATS = "dp_reshardable", "fully_reshardable", "fully_sharded_model_space"


class AsOnGPU(TorchFunctionMode):
    """Megatron's optimizer makes tensors on a GPU, and knows dtypes by the names that they have there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Make tensors on the CPU, and give dtypes the names of a GPU."""
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: value for name, value in (kwargs or {}).items() if (name, value) != ("device", "cuda")}
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and len(args) == 1 else found


@contextmanager
def as_on_gpu():
    """Run what Megatron's optimizer does on a GPU on the CPU."""
    with AsOnGPU(), mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        yield


class Training:
    """A model under Megatron's DDP with its distributed optimizer."""

    def __init__(self, cell, config, seed, sharding=None, of_ddp=None, of_optimizer=None):
        self.cell, self.metadata = cell, {"distrib_optim_sharding_type": sharding}
        torch.manual_seed(seed)
        self.model = Model(config, cell)
        dist.broadcast(self.model.dense.weight.detach(), 0)
        settings = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True} | (of_ddp or {})
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**settings), self.model)
        settings = {"optimizer": "adam", "lr": 1e-2, "bf16": True, "clip_grad": 0.0, "use_distributed_optimizer": True}
        with as_on_gpu():
            self.optimizer = get_megatron_optimizer(OptimizerConfig(**settings | (of_optimizer or {})), [self.ddp])

    def step(self):
        """Train one step."""
        train_step(self.model, self.ddp, self.cell)
        with as_on_gpu():
            self.optimizer.step()

    def values(self):
        """Copies of the weights, and of what the optimizer keeps for each in this rank's share."""
        inner = [part.optimizer for part in self.optimizer.chained_optimizers]
        states = [state[key] for each in inner for state in each.state.values() for key in ("exp_avg", "exp_avg_sq")]
        main = [param for each in inner for group in each.param_groups for param in group["params"]]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *main, *states)]

    def state(self, is_loading):
        """Return the sharded state dict that `dist_checkpointing` saves, or fills while it loads."""
        model = self.model.sharded_state_dict(metadata=self.metadata)
        with as_on_gpu():
            optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=self.metadata)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder):
        """Take the weights, and the optimizer's state, of a checkpoint."""
        loaded = dist_checkpointing.load(self.state(True), str(folder))
        self.model.load_state_dict(loaded["model"])
        with as_on_gpu():
            self.optimizer.load_state_dict(loaded["optimizer"])


def resumed(single, sharding):
    """Assert that a checkpoint restores weights and the optimizer's state, bit for bit."""
    megatron_world.model_parallel()
    cell = Cell(True, True, dtype="bfloat16", moe_single_grouped=single)
    first, second = (Training(cell, config_of(cell), seed, sharding) for seed in (1, 2))
    for training in (first, second):  # without Apex, Megatron loads only into state that a step has made
        training.step()
    kept, folder = first.values(), shared_folder()
    assert not all(torch.equal(*pair) for pair in zip(kept, second.values(), strict=True))
    dist_checkpointing.save(first.state(False), str(folder))
    second.load(folder)
    assert all(torch.equal(*pair) for pair in zip(kept, second.values(), strict=True))


def optimizer_formats():
    """By format, and by whether one parameter has all experts: None, or what failed."""
    return {
        f"{sharding} {single}": raised(lambda sharding=sharding, single=single: resumed(single, sharding))
        for sharding, single in product(FORMATS, (False, True))
    }
