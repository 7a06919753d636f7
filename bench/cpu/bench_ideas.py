"""Time that each idea saves: the same work with and without it, on the same layer.

| idea | without | with |
|---|---|---|
| fused accumulate | wgrad to a temporary, then `main_grad.add_` | wgrad adds into `main_grad` |
| overwrite on the first micro-batch | zero `main_grad`, then add | overwrite |
| four micro-batches in one launch | four queued micro-batches, one launch each | `fuse_microbatches=True` |
| fused activation backward | two grouped GEMMs, PyTorch's activation between them | one fused layer |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch.nn.functional as F

import fusedmlp
from bench.cpu.layers import Layer
from bench.cpu.peers import FUSED_ROWS


def _forward(layer: Layer, **options: object) -> Callable[[], None]:
    """Run forward, and return the backward."""
    y = fusedmlp.grouped_mlp(layer.x_RH, *layer.weights, layer.counts, probs=layer.probs_R, **options)
    return partial(y.backward, layer.dy_RH)


def _fused(layer: Layer) -> Callable[[], None]:
    y = FUSED_ROWS.forward(layer)
    return partial(FUSED_ROWS.backward, layer, y)


def _added_after(layer: Layer) -> Callable[[], None]:
    backward = _forward(layer, accumulate_wgrad="off")

    def run() -> None:
        backward()
        for weight in layer.weights:
            weight.main_grad.add_(weight.grad)

    return run


def _zeroed(layer: Layer) -> Callable[[], None]:
    backward = _forward(layer)

    def run() -> None:
        layer.buffer.flat.zero_()
        backward()

    return run


def _overwritten(layer: Layer) -> Callable[[], None]:
    return _forward(layer, is_first_microbatch=True)


def _queued(fuse: bool, layer: Layer) -> Callable[[], None]:
    queue = fusedmlp.WgradQueue(fuse_microbatches=fuse)
    for _ in range(4):
        layer.reset()
        _forward(layer, wgrad_queue=queue)()
    return queue.run


def _apart(layer: Layer) -> Callable[[], None]:
    gate, linear = fusedmlp.grouped_linear(layer.x_RH, layer.fc1, layer.counts).chunk(2, dim=-1)
    a = (F.silu(gate) * linear * layer.probs_R.unsqueeze(1)).to(layer.dtype)
    return partial(fusedmlp.grouped_linear(a, layer.fc2, layer.counts).backward, layer.dy_RH)


IDEAS = {
    "fused accumulate": (_added_after, _fused),
    "overwrite on the first micro-batch": (_zeroed, _overwritten),
    "four micro-batches in one launch": (partial(_queued, False), partial(_queued, True)),
    "fused activation backward": (_apart, _fused),
}


@pytest.mark.parametrize("side", ["without", "with"])
@pytest.mark.parametrize("idea", IDEAS)
def test_idea(layer, idea, side, record):
    prepare = IDEAS[idea][side == "with"]

    def setup() -> tuple[Callable[[], None]]:
        layer.reset()
        return (prepare(layer),)

    record(layer, f"idea: {idea}", side, lambda run: run(), setup)
