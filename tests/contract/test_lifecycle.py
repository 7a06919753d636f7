"""The life of a step: loops that train from a MainGradBuffer beside the same loops over plain gradients.

The reference of each loop adds the gradients of its micro-batches in float32 itself, and rounds them for its optimizer.
"""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import fusedmlp
from fusedmlp.operators import ops

COUNTS = [3, 0, 2]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Model(nn.Module):
    """A plain layer, fused experts with biases, and a weight that both kinds of layers use."""

    def __init__(self, dtype=torch.float32, accumulate="auto", **options):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, 4).to(dtype)
        self.experts = fusedmlp.GroupedMLP(3, 4, 5, bias=True, accumulate_wgrad=accumulate, dtype=dtype, **options)

    def forward(self, x, **options):
        return self.experts(self.router(x), COUNTS, **options) + self.experts.fc2.weight.mean()


def batch(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + seed)
    return (torch.randn(5, 4, generator=generator).to(dtype) for _ in range(2))


def backward(model, seed, scale=1.0, **options):
    x, dy = batch(seed, model.router.weight.dtype)
    loss = (model(x, **options) * dy).sum() * scale
    loss.backward()
    return loss.detach()


def sums(model, seeds):
    """Gradients of each micro-batch by itself, added in float32, of a model whose layers return them."""
    total = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for seed in seeds:
        model.zero_grad()
        backward(model, seed)
        for each, param in zip(total, model.parameters(), strict=True):
            each += param.grad
    model.zero_grad()
    return total


def set_grads(model, grads, max_norm=math.inf):
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = (grad * min(1.0, max_norm / (norm.item() + 1e-6))).to(param.dtype)


def assert_same(model, reference, dtype):
    """Parameters after steps; in 16 bits, an update may round to the next number."""
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=eps, atol=eps, msg=lambda m, name=name: f"{name}: {m}")


def twins(dtype, make_optimizer, **options):
    reference, model = Model(dtype, "off"), Model(dtype, **options)
    return (reference, make_optimizer(reference.parameters())), (model, make_optimizer(model.parameters()))


# With an optimizer: `.grad` is `main_grad`

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("zero_grad", ["set_to_none", "in place", "of the model", "buffer.zero_()"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@DTYPES
def test_the_usual_loop(dtype, make_optimizer, zero_grad):
    (reference, expected), (model, optimizer) = twins(dtype, make_optimizer)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    zero = {
        "set_to_none": optimizer.zero_grad,
        "in place": lambda: optimizer.zero_grad(set_to_none=False),
        "of the model": model.zero_grad,
        "buffer.zero_()": buffer.zero_,
    }[zero_grad]
    for step in range(3):
        seeds = range(3 * step, 3 * step + 3)
        zero()
        for seed in seeds:
            backward(model, seed)
        grads = sums(reference, seeds)
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert param.grad is param.main_grad
            assert param.grad.dtype == torch.float32
            torch.testing.assert_close(param.grad, grad, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 0.05)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 1.0
        torch.testing.assert_close(buffer.norm(), torch.tensor(1.0))
        set_grads(reference, [p.grad * (norm + 1e-6) for p in model.parameters()], max_norm=1.0)
        optimizer.step()
        expected.step()
        assert_same(model, reference, dtype)
        assert all(p.grad is p.main_grad for p in model.parameters())
    zero()
    assert buffer.norm() == 0


def test_sums_of_many_micro_batches_are_those_of_float32_for_plain_weights_too():
    """A router in bf16 would stop to move where its sum is 256 times what is added."""
    model = Model(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    for _ in range(600):
        backward(model, 1)
    expected = [600 * g for g in sums(Model(torch.bfloat16, "off"), [1])]
    for param, want in zip(model.parameters(), expected, strict=True):
        assert (param.grad - want).abs().max() <= 2e-2 * want.abs().max()


@DTYPES
def test_a_step_that_keeps_its_gradients_adds_to_them(dtype):
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    backward(model, 1)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    backward(model, 1)
    for param, once in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad, 2 * once)


@DTYPES
def test_a_gradient_that_was_replaced_is_taken_over(dtype):
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    backward(model, 1)
    before = [p.grad.clone() for p in model.parameters()]
    for param in model.parameters():
        param.grad = param.grad / 2
    half = torch.linalg.vector_norm(torch.cat([b.flatten() for b in before])) / 2
    torch.testing.assert_close(buffer.norm(), half)
    for param in model.parameters():
        param.grad = param.grad / 2
    backward(model, 1)
    for param, once in zip(model.parameters(), before, strict=True):
        assert param.grad is param.main_grad
        torch.testing.assert_close(param.grad, 1.25 * once)


@DTYPES
def test_gradients_from_before_the_buffer_count(dtype):
    model = Model(dtype)
    backward(model, 1)
    before = [p.grad.float() for p in model.parameters()]
    fusedmlp.MainGradBuffer(model.parameters(), optimizer=torch.optim.SGD(model.parameters()))
    backward(model, 2)
    for param, b, g in zip(model.parameters(), before, sums(Model(dtype, "off"), [2]), strict=True):
        torch.testing.assert_close(param.grad, b + g, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.05)


def test_autograd_grad_and_a_frozen_weight_touch_nothing():
    model = Model()
    fusedmlp.MainGradBuffer(model.parameters(), optimizer=torch.optim.SGD(model.parameters()))
    x, dy = batch(1)
    frozen = model.experts.fc1.weight.requires_grad_(False)
    torch.autograd.grad((model(x) * dy).sum(), [model.router.weight, model.experts.fc2.weight])
    assert all(p.grad is None for p in model.parameters())
    backward(model, 1)
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["experts.fc1.weight"]
    assert not frozen.main_grad.any()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("how", ["buffer", "FP32Accumulation"])
def test_a_grad_scaler(how, dtype, fused):
    """Scaled gradients exceed 65,504, the largest number of float16; unscaled ones do not, but for one step."""
    scale = 2.0**24
    make = partial(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=fused)  # 1e-8 is 0 in float16
    (reference, expected), (model, optimizer) = twins(dtype, make)
    if how == "buffer":
        fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    else:
        accumulation(model, optimizer)
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
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        else:
            set_grads(reference, sums(reference, seeds))
            expected.step()
        assert scaler.get_scale() == (scale if step < 2 else scale / 2)
        assert_same(model, reference, dtype)


@pytest.mark.parametrize("how", ["buffer", "FP32Accumulation"])
def test_a_gradient_that_overflows_float16_when_it_is_rounded_skips_a_fused_step(how):
    model = Model(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    if how == "buffer":
        fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    else:
        accumulation(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    backward(model, 1)
    model.router.weight.grad.fill_(1e6)
    before = copy.deepcopy(model.state_dict())
    scaler.step(optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def accumulation(model, optimizer):
    from fusedmlp.integrations.fp32_accumulation import FP32Accumulation

    return FP32Accumulation(model, optimizer)


HOW = pytest.mark.parametrize(
    "keep", [lambda m, o: fusedmlp.MainGradBuffer(m.parameters(), optimizer=o), accumulation], ids=["buffer", "FP32"]
)


@HOW
@DTYPES
@pytest.mark.parametrize("make_optimizer", [
    partial(torch.optim.SGD, lr=0.05), partial(torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
], ids=["SGD", "L-BFGS"])  # fmt: skip
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure(by_name, make_optimizer, dtype, keep):
    """Which L-BFGS runs several times in a step; its gradients are exact until it is over."""
    (reference, expected), (model, optimizer) = twins(dtype, make_optimizer)
    keep(model, optimizer)

    def closure(model, optimizer, plain):
        optimizer.zero_grad()
        if plain:
            loss = sum(backward_loss(model, seed) for seed in (1, 2))
            set_grads(model, sums(model, (1, 2)))
        else:
            loss = sum(backward(model, seed) for seed in (1, 2))
            wanted = torch.float32
            assert {p.grad.dtype for p in model.parameters()} == {wanted}
        return loss

    for _ in range(2):
        ours = partial(closure, model, optimizer, False)
        optimizer.step(closure=ours) if by_name else optimizer.step(ours)
        expected.step(partial(closure, reference, expected, True))
    if dtype == torch.float32:
        assert_same(model, reference, torch.bfloat16 if make_optimizer.func is torch.optim.LBFGS else dtype)
    else:
        assert all(p.isfinite().all() for p in model.parameters())
        if make_optimizer.func is torch.optim.SGD:
            assert_same(model, reference, dtype)


class Checked(torch.optim.SGD):
    """Looks at the gradients that it steps from."""

    def step(self, closure):
        loss = closure()
        for group in self.param_groups:
            assert all(p.grad.dtype == p.dtype for p in group["params"])
        super().step()
        return loss


@HOW
@DTYPES
def test_gradients_are_rounded_for_the_step_alone_and_not_for_its_closure(dtype, keep):
    model = Model(dtype)
    optimizer = Checked(model.parameters(), lr=0.05)
    keep(model, optimizer)

    def closure():
        before = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(grad.dtype == torch.float32 for grad in before)
        return backward(model, 1)

    for steps in (1, 2):
        optimizer.step(closure)
        assert len([p for p in model.parameters() if p.grad.dtype == torch.float32]) == 6, steps


def test_a_first_gradient_that_failed_has_not_arrived(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    backward(model, 1)
    optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(ops, "grouped_mlp_backward_", fail)
        with pytest.raises(torch.OutOfMemoryError):
            backward(model, 2)
    weight = model.experts.fc1.weight
    assert weight.grad is None
    backward(model, 3)
    index = [p is weight for p in model.parameters()].index(True)
    torch.testing.assert_close(weight.grad, sums(Model(accumulate="off"), [3])[index], rtol=1e-5, atol=1e-5)
    assert weight.grad is weight.main_grad
    assert buffer.norm() > 0


def test_is_first_microbatch_overwrites_what_was_written_by_hand(make_layer, assert_close):
    layer = make_layer()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    buffer.flat.fill_(torch.nan)
    layer.backward(1, is_first_microbatch=True)
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(1, 2))


@pytest.mark.parametrize("first", [False, True])
def test_an_owner_by_the_flag_gets_a_plain_gradient_of_an_earlier_micro_batch_too(first, make_layer, assert_close):
    layer = make_layer()
    before = [torch.zeros_like(b) if first else b for b in layer.attach(False)]
    for param in layer.params:
        (param * 2).sum().backward()
        if first:
            param.main_grad.fill_(torch.nan)
    layer.backward(1, is_first_microbatch=first)
    layer.backward(2)
    assert_close(layer.main_grads(), [b + 2 + w for b, w in zip(before, layer.wgrads(1, 2), strict=True)])
    assert not any(grad.any() for grad in layer.grads())


@torch.no_grad()
def backward_loss(model, seed):
    x, dy = batch(seed, model.router.weight.dtype)
    return (model(x) * dy).sum()


class Failing(torch.optim.SGD):
    """Clears its gradients inside a step, as SAM does, or fails in one."""

    def step(self, closure=None, clear=False, fail=False):
        if fail:
            raise ZeroDivisionError
        if clear:
            self.zero_grad()
        else:
            super().step(closure)


@HOW
@pytest.mark.parametrize("then", ["go on", "zero_grad", "step"])
def test_after_a_step_that_raised_sums_are_those_of_float32(then, keep):
    """In bf16 the sum of 64 gradients would be off by an eighth of one; the first one after it may be rounded."""
    model, twin = (Model(torch.bfloat16) for _ in range(2))
    optimizer, other = (Failing(m.parameters(), lr=0.0) for m in (model, twin))
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


@HOW
@DTYPES
def test_gradients_that_a_step_cleared_stay_cleared(dtype, keep):
    model = Model(dtype)
    optimizer = Failing(model.parameters(), lr=0.0)
    keep(model, optimizer)
    backward(model, 1)
    optimizer.step(clear=True)
    assert all(p.grad is None for p in model.parameters())
    backward(model, 2)
    for param, want in zip(model.parameters(), sums(Model(dtype, "off"), [2]), strict=True):
        torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.05)


def test_delayed_gradients_store_and_add_in_the_order_in_which_they_are_computed():
    """A whole backward between that of a delayed one and its queue comes first."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    queue = fusedmlp.WgradQueue()
    for step in range(2):
        optimizer.zero_grad()
        model.experts.wgrad_queue = queue
        backward(model, 2 * step)
        model.experts.wgrad_queue = None
        backward(model, 2 * step + 1)
        with pytest.raises(RuntimeError, match=r"SGD.step\(\): param_groups.*still in a WgradQueue"):
            optimizer.step()
        queue.run()
        reference = Model(accumulate="off")
        reference.load_state_dict(model.state_dict())
        for param, want in zip(model.parameters(), sums(reference, (2 * step, 2 * step + 1)), strict=True):
            torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5)
        optimizer.step()
    assert buffer.norm() > 0


def test_which_optimizers_and_parameters():
    model = Model()
    with pytest.raises(TypeError, match=r"optimizer: expected a torch\.optim\.Optimizer; got object"):
        fusedmlp.MainGradBuffer(model.parameters(), optimizer=object())
    with pytest.raises(ValueError, match=r"params\[1\]: expected a parameter of the optimizer; got one that none"):
        fusedmlp.MainGradBuffer(model.parameters(), optimizer=torch.optim.SGD([model.router.weight]))
    assert not any(hasattr(p, "main_grad") for p in model.parameters())


@DTYPES
def test_detach_leaves_plain_gradients(dtype):
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer)
    backward(model, 1)
    held = [p.grad.to(dtype) for p in model.parameters()]
    buffer.detach()
    assert all(torch.equal(p.grad, h) and p.grad.dtype == dtype for p, h in zip(model.parameters(), held, strict=True))
    assert not any(hasattr(p, "main_grad") for p in model.parameters())
    reference = Model(dtype, "off")
    set_grads(reference, [h.float() for h in held])
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.05).step()
    assert_same(model, reference, dtype)


# Without an optimizer


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_is_first_microbatch_begins_the_step_of_the_whole_buffer(checkpointed, flag):
    """Biases and the router too, which would add up from step to step, and of a weight frozen since nothing is left."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), grad_added_to_main_grad=flag)
    for step in range(4):
        frozen = model.experts.fc1.weight.requires_grad_(step != 2)
        held = frozen.detach().clone()
        for seed in (2 * step, 2 * step + 1):
            if checkpointed:
                x, dy = batch(seed)
                run = partial(model, is_first_microbatch=seed % 2 == 0)
                y = torch.utils.checkpoint.checkpoint(run, x.requires_grad_(), use_reentrant=True)
                (y * dy).sum().backward()
            else:
                backward(model, seed, is_first_microbatch=seed % 2 == 0)
        reference = Model(accumulate="off")
        reference.load_state_dict(model.state_dict())
        with buffer.as_grad():
            for (name, param), want in zip(
                model.named_parameters(), sums(reference, (2 * step, 2 * step + 1)), strict=True
            ):
                if param is frozen and step == 2:
                    assert param.grad is None
                else:
                    torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5, msg=name)
            optimizer.step()
        assert torch.equal(frozen, held) == (step == 2)


def test_the_second_layer_of_a_step_does_not_begin_another_one():
    """Two models in one buffer, each with is_first_microbatch, the second after the first one's backward."""
    model, other = Model(), Model()
    buffer = fusedmlp.MainGradBuffer([*model.parameters(), *other.parameters()])
    for seed in (1, 2):
        backward(model, seed, is_first_microbatch=True)
        backward(other, seed, is_first_microbatch=True)
        with buffer.as_grad():
            for each in (model, other):
                for param, want in zip(each.parameters(), sums(Model(accumulate="off"), [seed]), strict=True):
                    torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5)


def test_a_stale_gradient_of_another_queue_is_not_added_later():
    model, queue = Model(), fusedmlp.WgradQueue()
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    model.experts.wgrad_queue = queue
    backward(model, 1)
    model.experts.wgrad_queue = None
    with pytest.raises(RuntimeError, match=r"a new step: expected every gradient .*; got one of params\[2\]"):
        backward(model, 2, is_first_microbatch=True)
    queue.clear()
    buffer.zero_()
    backward(model, 2, is_first_microbatch=True)
    with buffer.as_grad():
        for param, want in zip(model.parameters(), sums(Model(accumulate="off"), [2]), strict=True):
            torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5)


def test_a_step_that_begins_inside_another_backward_is_refused():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    backward(model, 1)
    with buffer.as_grad():
        optimizer.step()
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def inner(_):
        with torch.enable_grad():
            backward(model, 2, is_first_microbatch=True)

    y.register_hook(inner)
    with pytest.raises(RuntimeError, match="is_first_microbatch=True inside a backward: expected a step"):
        y.backward()
    buffer.zero_()
    y = x * 2
    y.register_hook(inner)
    y.backward()
    with buffer.as_grad():
        for param, want in zip(model.parameters(), sums(Model(accumulate="off"), [2]), strict=True):
            torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5)


def test_a_reentrant_checkpoint_amid_a_step_that_no_optimizer_ended_is_refused(make_layer):
    layer = make_layer()
    fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1)
    x, dy = layer.batch(2)
    run = partial(layer, is_first_microbatch=True)
    y = torch.utils.checkpoint.checkpoint(run, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"in a reentrant checkpoint: expected buffer.zero_\(\) or zero_grad\(\)"):
        y.backward(dy)


# as_grad


@DTYPES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_inside_as_grad_ends_the_step(set_to_none, dtype):
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    for seed in (1, 2, 3):
        backward(model, seed)
        want = sums(Model(dtype, "off"), [seed])
        expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in want]))
        torch.testing.assert_close(buffer.norm(), expected, rtol=1e-2, atol=0)
        with buffer.as_grad():
            optimizer.step()
            optimizer.zero_grad(set_to_none)


@DTYPES
@pytest.mark.parametrize("edit", ["clip", "unscale", "replace"])
def test_an_edit_in_one_block_is_there_in_the_next(edit, dtype):
    model = Model(dtype)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    backward(model, 1)
    before = buffer.norm()
    with buffer.as_grad():
        if edit == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), before / 2)
        for param in model.parameters() if edit != "clip" else []:
            if edit == "unscale":
                param.grad.mul_(0.5)
            else:
                param.grad = param.grad / 2
    torch.testing.assert_close(buffer.norm(), before / 2, rtol=1e-2, atol=0)
    with buffer.as_grad():
        total = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]).float())
    torch.testing.assert_close(total, before / 2, rtol=1e-2, atol=0)


def test_a_block_without_an_edit_rounds_nothing():
    model = Model(torch.bfloat16)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    backward(model, 1)
    backward(model, 2)
    buffer.norm()
    before = buffer.flat.clone()
    with buffer.as_grad():
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(buffer.flat, before)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("make_optimizer", [
    partial(torch.optim.SGD, lr=0.05), partial(torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
], ids=["SGD", "L-BFGS"])  # fmt: skip
def test_a_closure_inside_as_grad(make_optimizer, flag):
    (reference, expected), (model, optimizer) = twins(torch.float32, make_optimizer)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), grad_added_to_main_grad=flag)

    def closure(model, optimizer):
        optimizer.zero_grad()
        return sum(backward(model, seed) for seed in (1, 2))

    for _ in range(2):
        buffer.zero_()
        backward(model, 5)  # which the closure discards
        with buffer.as_grad():
            optimizer.step(partial(closure, model, optimizer))
        expected.step(partial(closure, reference, expected))
    assert_same(model, reference, torch.bfloat16 if make_optimizer.func is torch.optim.LBFGS else torch.float32)


def test_a_closure_inside_as_grad_of_16_bit_weights_is_refused():
    model = Model(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    with pytest.raises(RuntimeError, match=r"a backward inside as_grad\(\): expected weights in the"):
        with buffer.as_grad():
            optimizer.step(lambda: backward(model, 1))


# The guard


def guarded(model, optimizer, *, queue=None, closure=False):
    with pytest.raises(RuntimeError) as error:
        optimizer.step(lambda: backward(model, 2)) if closure else optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("closure", [False, True])
def test_a_step_past_a_buffer_raises(closure, flag, make_optimizer):
    """From an expanded dummy, a fused optimizer would read out of bounds."""
    model = Model()
    optimizer = make_optimizer(model.parameters())
    buffer = fusedmlp.MainGradBuffer(model.parameters(), grad_added_to_main_grad=flag)
    optimizer.step()  # nothing has come yet
    if not closure:
        backward(model, 1)
    held = copy.deepcopy(model.state_dict())
    message = guarded(model, optimizer, closure=closure)
    what = "a zero dummy" if flag else "nothing"
    assert "param_groups[0]['params'][2]: expected its gradient in .grad; got one that is in main_grad" in message
    assert f"with {what} in .grad: step inside of buffer.as_grad()" in message
    assert all(torch.equal(held[name], p) for name, p in model.state_dict().items())
    with buffer.as_grad():
        optimizer.step()
    assert not torch.equal(held["experts.fc1.weight"], model.experts.fc1.weight)


@pytest.mark.parametrize("attached", [True, False], ids=["main_grad", ".grad"])
@pytest.mark.parametrize("closure", [False, True])
def test_a_step_before_a_queue_has_run_raises(closure, attached):
    model = Model(delay_wgrad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attached:
        for param in (model.experts.fc1.weight, model.experts.fc2.weight):
            param.main_grad = torch.zeros_like(param)
    if not closure:
        backward(model, 1)
    assert "got one that is still in a WgradQueue: call backward_dw()" in guarded(model, optimizer, closure=closure)
    model.experts.backward_dw()
    optimizer.step()


def test_an_optimizer_that_steps_from_the_dummy_of_another_owner_raises(make_layer):
    layer = make_layer()
    layer.attach(False)
    fusedmlp.WgradQueue()
    layer.backward(1)
    with pytest.raises(RuntimeError, match=r"expected its gradient in .*; got one that is in main_grad"):
        torch.optim.SGD(layer.params, lr=0.1).step()
    for param in layer.params:
        param.grad = param.main_grad
    torch.optim.SGD(layer.params, lr=0.1).step()


# Hooks that come too early


@pytest.mark.parametrize("attached", [True, False], ids=["main_grad", ".grad"])
def test_a_delayed_gradient_is_refused_where_a_hook_would_step_before_it_is_there(attached):
    model = Model(delay_wgrad=True)
    weight = model.experts.fc1.weight
    if attached:
        weight.main_grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    handle = weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(RuntimeError, match="fc1_weight: the parameter has a post-accumulate-grad hook, which backward"):
        backward(model, 1)
    with torch.no_grad():
        model(next(batch(1)))
    weight.skip_backward_post_hook = True  # as an owner does whose hook waits for backward_dw()
    model(next(batch(1)))
    del weight.skip_backward_post_hook
    handle.remove()
    backward(model, 1)
    model.experts.backward_dw()


# In a graph


@pytest.mark.parametrize("with_optimizer", [True, False])
@DTYPES
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, as the next
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model(dtype, with_optimizer):
    torch._dynamo.reset()
    (reference, expected), (model, optimizer) = twins(dtype, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    buffer = fusedmlp.MainGradBuffer(model.parameters(), optimizer=optimizer if with_optimizer else None)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        optimizer.zero_grad() if with_optimizer else buffer.zero_()
        for seed in (2 * step, 2 * step + 1):
            x, dy = batch(seed, dtype)
            (compiled(x) * dy).sum().backward()
        set_grads(reference, sums(reference, (2 * step, 2 * step + 1)))
        expected.step()
        with buffer.as_grad():
            optimizer.step()
        assert_same(model, reference, dtype)
