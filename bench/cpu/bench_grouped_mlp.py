"""Forward and backward of one layer, fusedmlp beside its peers: time, memory, operators.

    pytest bench --benchmark-only

Backward ends with the gradients in fp32 `main_grad`. Each peer's results are compared with float64 before it is timed.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from bench.cpu import recording
from bench.cpu.checks import check
from bench.cpu.layers import Layer
from bench.cpu.peers import PEERS, Peer

LEVELS = {"rows": "sorted rows", "tokens": "whole layer of tokens"}


@cache
def checked(layer: Layer, peer: Peer) -> dict[str, Any]:
    """Check the results of two runs, which show a peer that overwrites where it should add; then count memory and
    operators.
    """
    layer.zero()
    for _ in range(2):
        layer.reset()
        y = peer.forward(layer)
        peer.backward(layer, y)
    errors = check(layer, peer.level, y, peer.name, times=2)
    layer.reset()
    inputs = (*layer.weights, layer.x_RH, layer.x_TH, layer.probs_R, layer.top_k_weights)
    saved = recording.saved_bytes(partial(peer.forward, layer), inputs)
    y = peer.forward(layer)
    used = recording.footprint(lambda: peer.backward(layer, y))
    worst = max(errors.relative().values())
    return {**used._asdict(), "saved_bytes": saved, "error": worst, "allowed": errors.allowed()}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_forward(layer, peer, record, require):
    require(peer.name, peer.missing)
    extra = checked(layer, peer)
    record(layer, f"forward, {LEVELS[peer.level]}", peer.name, partial(peer.forward, layer), layer.reset, **extra)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_backward(layer, peer, record, require):
    require(peer.name, peer.missing)
    extra = checked(layer, peer)

    def forward() -> tuple[Layer, Any]:
        layer.reset()
        return layer, peer.forward(layer)

    record(layer, f"backward, {LEVELS[peer.level]}", peer.name, peer.backward, forward, **extra)
