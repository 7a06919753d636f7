"""Experts in 8 bits under Megatron-FSDP, against `support/eight_bit.py`. Runs in a `world`."""

from dataclasses import dataclass

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
import torch.distributed as dist
from integrations import megatron_fsdp  # replaces functions of PyTorch, so other worlds do without
from integrations.megatron_eight_bit import EightBitCell, config_of, expected_grads
from support import megatron_experts
from support.eight_bit import magnitudes
from support.megatron_experts import reduced


@dataclass(frozen=True)
class EightBitFsdpCell(EightBitCell, megatron_fsdp.FsdpCell):
    """One configuration with fp8="e4m3" under Megatron-FSDP."""


def under_fsdp():
    """Largest error of a gradient, by strategy, over two steps; weights are gathered anew for each micro-batch."""
    megatron_world.model_parallel()
    found = {}
    for strategy in megatron_fsdp.STRATEGIES:
        cell = EightBitFsdpCell(strategy=strategy, microbatches=2, unit="layer")
        if megatron_fsdp.refusal(cell) is not None:
            continue
        torch.manual_seed(0)
        layers = megatron_fsdp.Layers(config := config_of(cell), cell)
        model = layers.layer.mlp
        with torch.no_grad():
            for weight in [param for param in model.parameters() if param.dim() == 2]:
                weight.mul_(magnitudes(weight.shape, cell.spread))
            dist.broadcast(model.dense.weight, 0)
        weights = {name: w.clone() for name, w in megatron_experts.weights_of(model).items()}
        experts = {f"experts.{name}" for name, _ in model.experts.named_parameters()}
        fsdp, errors = megatron_fsdp.wrap(config, cell, layers), []
        for _ in range(2):
            fsdp.set_is_first_microbatch()
            megatron_fsdp.train_step(fsdp, cell)
            want = reduced(expected_grads(weights, cell, *cell.formats), experts, cell)
            got = megatron_fsdp.landed(fsdp, cell)
            errors += [float((got[name] - grad).norm() / grad.norm()) for name, grad in want.items() if grad.any()]
            megatron_fsdp.step(fsdp)
            weights = {name: w - megatron_fsdp.LEARNING_RATE * got[name] for name, w in weights.items()}
        found[strategy] = max(errors)
    return found
