"""GradScaler and clipping with gradients in the memory of a `MainGradBuffer`."""

import copy

import pytest
import torch

import fusedmlp

SCALE = 2.0**10
COUNTS = [3, 0, 2]


def train(fused, batches, *, max_norm=None, accumulate="main_grad"):
    """Adam steps with a GradScaler, from main_grad or (the reference) .grad; the model before and after, the scale."""
    generator = torch.Generator().manual_seed(0)
    model = fusedmlp.GroupedMLP(3, 4, 5, accumulate_wgrad=accumulate if fused else "off")
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    start = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
    buffer = fusedmlp.MainGradBuffer(model.parameters()) if fused else None
    for x, dy in batches:
        optimizer.zero_grad()
        model(x, COUNTS).backward(scaler.scale(dy))
        step(scaler, optimizer, model, max_norm)
    assert buffer is None or all(param.grad is param.main_grad for param in model.parameters())
    return start, model, scaler.get_scale()


def step(scaler, optimizer, model, max_norm):
    scaler.unscale_(optimizer)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


def batches(count, *, overflow=()):
    generator = torch.Generator().manual_seed(1)
    result = [(torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(count)]
    for i in overflow:
        result[i][1][0, 0] = float("inf")
    return result


def same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def assert_close(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-5


@pytest.mark.parametrize("max_norm", [None, 1e-2, 1e6])
def test_steps_from_main_grad_are_those_from_grad(max_norm):
    start, fused, _ = train(True, batches(4), max_norm=max_norm)
    _, plain, _ = train(False, batches(4), max_norm=max_norm)
    assert_close(fused, plain)
    assert (fused.fc1.weight - start.fc1.weight).abs().max() > 0.05


def test_a_step_with_an_infinite_gradient_is_skipped_and_the_scale_halved():
    start, fused, scale = train(True, batches(1, overflow=[0]))
    assert same(fused, start)
    assert scale == SCALE / 2
    _, fused, scale = train(True, batches(4, overflow=[1]))
    _, plain, reference = train(False, batches(4, overflow=[1]))
    assert_close(fused, plain)
    assert scale == reference == SCALE / 2
