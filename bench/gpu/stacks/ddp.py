"""PyTorch's DDP on one rank around Transformers' model: gradients copied into buckets, and `grads_in_buckets`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.gpu.stacks import transformers
from bench.gpu.stacks.training import Training
from bench.gpu.stacks.widths import Widths
from fusedmlp.integrations.ddp import grads_in_buckets


def variants(widths: Widths, device: str, compiled: bool) -> dict[str, Callable[[], Training]]:
    """Trainings by the name of the experts; the first has PyTorch's `grouped_mm`."""
    make = {"grouped_mm": ("grouped_mm", _ddp), "fusedmlp": ("fusedmlp", _ddp)}
    make["fusedmlp, grads_in_buckets"] = ("fusedmlp", _in_buckets)
    return {name: partial(transformers.build, widths, device, *each) for name, each in make.items()}


def _ddp(model: nn.Module) -> DistributedDataParallel:
    if not torch.distributed.is_initialized():
        backend, store = "nccl" if next(model.parameters()).is_cuda else "gloo", torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _in_buckets(model: nn.Module) -> DistributedDataParallel:
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    return grads_in_buckets(model, experts, _ddp)
