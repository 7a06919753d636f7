"""The weight gradient of fc1 alone, into fp32 `main_grad`: fusedmlp beside its peers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench.cpu.checks import check_wgrad
from bench.cpu.peers import WGRADS


@pytest.mark.parametrize("peer", WGRADS, ids=lambda peer: peer.name)
@torch.no_grad()
def test_wgrad(layer, peer, record, require):
    require(peer.name, peer.missing)
    torch.manual_seed(1)
    dh_RG = torch.randn(layer.shape.R, 2 * layer.shape.F, device=layer.device).to(layer.dtype)
    layer.buffer.flat.zero_()
    for _ in range(2):
        peer.run(layer, dh_RG)
    errors = check_wgrad(layer, dh_RG, peer.name, times=1 if peer.overwrites else 2)
    worst = max(errors.relative().values())
    run = partial(peer.run, layer, dh_RG)
    record(layer, "wgrad of fc1", peer.name, run, lambda: None, error=worst, allowed=errors.allowed())
