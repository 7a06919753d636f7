"""FlopCounterMode counts as many FLOPs for our operators as for a loop of products over the experts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fusedmlp

COUNTS, H, F = (5, 0, 9, 2), 8, 12
ROWS, EXPERTS = sum(COUNTS), len(COUNTS)
IMPLS = ["torch", "triton"]


def weights(gated=True, packed=True):
    sizes = (2 * F if gated else F, H), (H, F)
    if packed:
        return [torch.randn(EXPERTS, *size, requires_grad=True) for size in sizes]
    return [[torch.randn(*size, requires_grad=True) for _ in COUNTS] for size in sizes]


def flops(function):
    """FLOPs of a call, and of the backward of its result."""
    with FlopCounterMode(display=False) as forward:
        y = function()
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def loop(x, fc1, fc2=None):
    rows = []
    for e, part in enumerate(x.split(COUNTS)):
        h = part @ fc1[e].T
        if fc2 is not None:
            gate, linear = h.chunk(2, -1) if fc1[e].shape[0] > F else (h, 1.0)
            h = (torch.nn.functional.silu(gate) * linear) @ fc2[e].T
        rows.append(h)
    return torch.cat(rows)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("needs", ["all", "x frozen", "fc1 frozen", "fc2 frozen"])
def test_grouped_mlp(needs, gated, packed, impl):
    x, (fc1, fc2) = torch.randn(ROWS, H, requires_grad=needs != "x frozen"), weights(gated, packed)
    for name, weight in (("fc1", fc1), ("fc2", fc2)):
        for each in [weight] if packed else weight:
            each.requires_grad_(needs != f"{name} frozen")
    activation = "swiglu" if gated else "silu"
    ours = flops(lambda: fusedmlp.grouped_mlp(x, fc1, fc2, COUNTS, activation=activation, impl=impl))
    assert ours == flops(lambda: loop(x, fc1, fc2))
    assert ours[0] == 2 * ROWS * H * F * (3 if gated else 2)


@pytest.mark.parametrize("impl", IMPLS)
def test_grouped_linear(impl):
    x, (weight, _) = torch.randn(ROWS, H, requires_grad=True), weights()
    ours = flops(lambda: fusedmlp.grouped_linear(x, weight, COUNTS, impl=impl))
    assert ours == flops(lambda: loop(x, weight)) == (4 * ROWS * H * F, 8 * ROWS * H * F)


@pytest.mark.parametrize("impl", IMPLS)
def test_moe_experts(impl):
    """Every choice of every token is a row, as in a loop over experts."""
    tokens, choices = 6, 2
    x, (fc1, fc2) = torch.randn(tokens, H, requires_grad=True), weights()
    ids, probs = torch.randint(0, EXPERTS, (tokens, choices)), torch.rand(tokens, choices)
    forward = 2 * tokens * choices * 3 * H * F
    assert flops(lambda: fusedmlp.moe_experts(x, ids, probs, fc1, fc2, impl=impl)) == (forward, 2 * forward)


@pytest.mark.parametrize("impl", IMPLS)
def test_delayed_weight_gradients_of_two_micro_batches(impl):
    x, (fc1, fc2) = torch.randn(ROWS, H, requires_grad=True), weights()
    fusedmlp.MainGradBuffer([fc1, fc2])
    queue = fusedmlp.WgradQueue(fuse_microbatches=True)
    for _ in range(2):
        one = flops(lambda: fusedmlp.grouped_mlp(x, fc1, fc2, COUNTS, wgrad_queue=queue, impl=impl))
        assert one[0] == one[1] == 6 * ROWS * H * F
    with FlopCounterMode(display=False) as counted:
        queue.run()
    assert counted.get_total_flops() == 2 * 6 * ROWS * H * F


@pytest.mark.parametrize("impl", IMPLS)
def test_delayed_weight_gradients_of_gathered_rows(impl):
    x, (fc1, fc2) = torch.randn(6, H, requires_grad=True), weights()
    fusedmlp.MainGradBuffer([fc1, fc2])
    queue, ids = fusedmlp.WgradQueue(), torch.randint(0, EXPERTS, (6, 3))
    fusedmlp.moe_experts(x, ids, torch.rand(6, 3), fc1, fc2, wgrad_queue=queue, impl=impl).sum().backward()
    with FlopCounterMode(display=False) as counted:
        queue.run()
    assert counted.get_total_flops() == 6 * 6 * 3 * H * F
