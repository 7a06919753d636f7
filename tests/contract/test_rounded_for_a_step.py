"""float32 gradients that are rounded only during optimizer steps: closures, scalers, steps that raise or clear."""

import copy
from functools import partial

import pytest
import torch
from support.loops import (
    DTYPES,
    KEPT_IN_FP32,
    Model,
    assert_same,
    backward,
    set_grads,
    sums,
    twins,
)

import fusedmlp


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("unscaled", [False, True], ids=["", "unscaled by the loop"])
@KEPT_IN_FP32
def test_a_grad_scaler(keep, unscaled, dtype, fused):
    """Scaled gradients exceed 65,504, the largest number of float16; unscaled ones do not, except in one step."""
    scale = 2.0**24
    make = partial(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=fused)  # 1e-8 is 0 in float16
    (reference, expected), (model, optimizer) = twins(dtype, make)
    keep(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    for step in range(4):
        seeds, overflow = (2 * step, 2 * step + 1), step == 2
        scaler.scale(torch.zeros(()))
        optimizer.zero_grad()
        for seed in seeds:
            backward(model, seed)
        for param in model.parameters():  # as if the loss had been scaled, and no activation had overflowed
            param.grad.mul_(scaler.get_scale())
        if overflow:
            model.router.bias.grad[0] = torch.inf
        before = copy.deepcopy(model.state_dict())
        if unscaled:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        else:
            set_grads(reference, sums(reference, seeds))
            expected.step()
        assert scaler.get_scale() == (scale if step < 2 else scale / 2)
        assert_same(model, reference, dtype)


@pytest.mark.parametrize("unscaled", [False, True])
@KEPT_IN_FP32
def test_a_gradient_that_float16_cannot_hold(keep, unscaled):
    """A fused step gets it scaled down or, where the loop has unscaled it, is skipped."""
    model = Model(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    keep(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    backward(model, 1)
    model.router.weight.grad.fill_(1e6)
    before = copy.deepcopy(model.state_dict())
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    if unscaled:
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    else:
        torch.testing.assert_close(model.router.weight, before["router.weight"] - 0.1, rtol=0, atol=1e-3)


@pytest.mark.parametrize("gradient", [0.0, 1e-9, 2e-8, 1e-3])
@KEPT_IN_FP32
def test_a_small_gradient_is_no_zero_in_a_fused_step(keep, gradient):
    """Unscaled it would be zero in float16; the optimizer unscales it in float32."""
    steps = []
    for kept in (False, True):
        module = torch.nn.Module()
        for name, size in (("weight", 4), ("empty", 0)):
            module.register_parameter(name, torch.nn.Parameter(torch.ones(size, dtype=torch.float16)))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True, weight_decay=0.0)
        if kept:
            keep(module, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale((module.weight.float() * gradient).sum() + module.empty.sum()).backward()
        scaler.step(optimizer)
        assert module.weight.grad.isfinite().all()
        steps.append(module.weight.detach())
    assert (steps[0] < 1).all() == (gradient > 0)
    assert torch.equal(*steps)


class Checked(torch.optim.SGD):
    """Asserts that the gradients of a step have the dtypes of their parameters; clears them, as SAM does, or fails."""

    def step(self, closure=None, clear=False, fail=False):
        for run in [lambda: None] if closure is None else [closure] * 3:  # as in a line search
            loss = run()
            assert all(p.grad is None or p.grad.dtype == p.dtype for g in self.param_groups for p in g["params"])
        if fail:
            raise ZeroDivisionError
        if clear:
            self.zero_grad()
        else:
            super().step()
        return loss


@KEPT_IN_FP32
@DTYPES
@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_are_rounded_for_the_step_alone_and_not_for_its_closure(by_name, dtype, keep):
    (reference, expected), (model, optimizer) = twins(dtype, partial(Checked, lr=0.05))
    keep(model, optimizer)

    def closure():
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.zero_grad()
        losses = [backward(model, seed) for seed in (1, 2)]
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        return sum(losses)

    for _ in range(2):
        assert (optimizer.step(closure=closure) if by_name else optimizer.step(closure)).isfinite()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        set_grads(reference, sums(reference, (1, 2)))
        expected.step()
        assert_same(model, reference, dtype)


@KEPT_IN_FP32
@pytest.mark.parametrize("then", ["go on", "zero_grad", "step"])
def test_after_a_step_that_raised_sums_are_those_of_float32(then, keep):
    """A sum of 64 gradients would be off by an eighth of one in bf16; only the gradient after it may be rounded."""
    model, twin = (Model(torch.bfloat16) for _ in range(2))
    optimizer, other = (Checked(m.parameters(), lr=0.0) for m in (model, twin))
    keep(model, optimizer)
    keep(twin, other)
    for each in (model, twin):
        for _ in range(64):
            backward(each, 1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail=True)
    for each, opt in ((model, optimizer), (twin, other)):
        if then == "zero_grad":
            opt.zero_grad()
        elif then == "step":
            opt.step()
        backward(each, 3)
        backward(each, 3)
    for (name, param), want, one in zip(
        model.named_parameters(), twin.parameters(), sums(Model(torch.bfloat16, "off"), [3]), strict=True
    ):
        assert param.grad.dtype == torch.float32, name
        assert (param.grad - want.grad).abs().max() <= 2**-7 * one.abs().max(), name


@KEPT_IN_FP32
@DTYPES
def test_gradients_that_a_step_cleared_stay_cleared(dtype, keep):
    model = Model(dtype)
    optimizer = Checked(model.parameters(), lr=0.0)
    keep(model, optimizer)
    backward(model, 1)
    optimizer.step(clear=True)
    assert all(p.grad is None for p in model.parameters())
    backward(model, 2)
    for param, want in zip(model.parameters(), sums(Model(dtype, "off"), [2]), strict=True):
        torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_model_cast_after_its_buffer_was_made_steps_as_one_cast_before(optimizer):
    models = [fusedmlp.GroupedMLP(2, 4, 6) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, early in zip(models, (True, False), strict=True):
        if early:
            model.bfloat16()
        made = optimizer(model.parameters(), lr=0.1)
        buffer = fusedmlp.MainGradBuffer(model.parameters())
        model.bfloat16()
        torch.manual_seed(0)
        for _ in range(2):
            model(torch.randn(5, 4, dtype=torch.bfloat16), [2, 3]).square().sum().backward()
        assert all(param.grad.dtype == torch.float32 for param in model.parameters())
        made.step()
        del buffer  # kept until here
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


class Outer(torch.optim.Optimizer):
    """Steps another optimizer of the same parameters, and doubles every gradient."""

    def __init__(self, params, inner):
        super().__init__(params, {})
        self.inner = inner

    def step(self):
        self.inner.step()
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad.dtype == param.dtype  # also after the inner step
                param.grad.mul_(2)


def test_what_an_optimizer_writes_to_grad_stays():
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    _kept = fusedmlp.MainGradBuffer([param])
    (param.float() * (1 + 2**-10)).sum().backward()
    param.grad.fill_(1 + 2**-10)
    Outer([param], torch.optim.SGD([param], lr=0.0)).step()
    assert param.grad is param.main_grad
    assert param.grad.tolist() == [2.0] * 4  # that of the rounded copy
