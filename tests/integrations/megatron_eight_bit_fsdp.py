"""Experts in 8 bits under Megatron-FSDP, against `support/eight_bit.py`. Runs in a `world`."""

from dataclasses import dataclass

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
from integrations import megatron_fsdp  # replaces functions of PyTorch, so other worlds do without
from integrations.megatron_eight_bit import EightBitCell, config_of, expected_grads
from support.megatron_experts import reduced


@dataclass(frozen=True)
class EightBitFsdpCell(EightBitCell, megatron_fsdp.FsdpCell):
    """One configuration with fp8="e4m3" under Megatron-FSDP."""


def under_fsdp():
    """Largest error of a gradient, by strategy, over two steps; weights are gathered anew for each micro-batch."""
    megatron_world.model_parallel()
    found = {}
    for strategy in megatron_fsdp.STRATEGIES:
        cell, errors = EightBitFsdpCell(strategy=strategy, microbatches=2, unit="layer"), []
        if megatron_fsdp.refusal(cell) is not None:
            continue
        for weights, got in megatron_fsdp.steps(cell, config_of(cell)):
            want = reduced(expected_grads(weights, cell, *cell.formats), (), cell)
            errors += [float((got[name] - grad).norm() / grad.norm()) for name, grad in want.items() if grad.any()]
        found[strategy] = max(errors)
    return found
