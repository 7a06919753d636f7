"""The usual loop with a `MainGradBuffer`, whose memory `.grad` is."""

import pytest
import torch
from support.loops import DTYPES, OPTIMIZERS, SGD, Model, assert_same, backward, batch, set_grads, sums, twins

import fusedmlp
from fusedmlp.operators import ops


@pytest.mark.parametrize("zero_grad", ["set_to_none", "in place", "of the model", "buffer.zero_grad()"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@DTYPES
def test_the_usual_loop(dtype, make_optimizer, zero_grad):
    (reference, expected), (model, optimizer) = twins(dtype, make_optimizer)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    zero = {
        "set_to_none": optimizer.zero_grad,
        "in place": lambda: optimizer.zero_grad(set_to_none=False),
        "of the model": model.zero_grad,
        "buffer.zero_grad()": buffer.zero_grad,
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
    """A router's sum in bf16 would stop growing at 256 times what is added."""
    model = Model(torch.bfloat16)
    fusedmlp.MainGradBuffer(model.parameters())
    for _ in range(600):
        backward(model, 1)
    expected = [600 * g for g in sums(Model(torch.bfloat16, "off"), [1])]
    for param, want in zip(model.parameters(), expected, strict=True):
        assert (param.grad - want).abs().max() <= 2e-2 * want.abs().max()


@DTYPES
def test_a_step_that_keeps_its_gradients_adds_to_them(dtype):
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fusedmlp.MainGradBuffer(model.parameters())
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
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    backward(model, 1)
    before = [p.grad.clone() for p in model.parameters()]
    for param in model.parameters():
        param.grad = param.grad / 2
    half = torch.linalg.vector_norm(torch.cat([b.flatten() for b in before])) / 2
    torch.testing.assert_close(buffer.norm(), half)
    for param in model.parameters():
        param.grad = param.grad / 2
    backward(model, 1)
    buffer.norm()
    for param, once in zip(model.parameters(), before, strict=True):
        assert param.grad is param.main_grad
        torch.testing.assert_close(param.grad, 1.25 * once)


@DTYPES
def test_gradients_from_before_the_buffer_count(dtype):
    model = Model(dtype)
    backward(model, 1)
    before = [p.grad.float() for p in model.parameters()]
    fusedmlp.MainGradBuffer(model.parameters())
    backward(model, 2)
    for param, b, g in zip(model.parameters(), before, sums(Model(dtype, "off"), [2]), strict=True):
        torch.testing.assert_close(param.grad, b + g, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.05)


def test_autograd_grad_and_a_frozen_weight_touch_nothing():
    model = Model()
    fusedmlp.MainGradBuffer(model.parameters())
    x, dy = batch(1)
    frozen = model.experts.fc1.weight.requires_grad_(False)
    torch.autograd.grad((model(x) * dy).sum(), [model.router.weight, model.experts.fc2.weight])
    assert all(p.grad is None for p in model.parameters())
    backward(model, 1)
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["experts.fc1.weight"]
    assert not frozen.main_grad.any()


def test_a_first_gradient_that_failed_has_not_arrived(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
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


def test_delayed_gradients_store_and_add_in_the_order_in_which_they_are_computed():
    """A whole backward between a delayed one and its queue is computed first, and stores."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
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


@DTYPES
def test_detach_leaves_plain_gradients(dtype):
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
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


@pytest.mark.slow
@DTYPES
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, as the next
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model(dtype):
    torch._dynamo.reset()
    (reference, expected), (model, optimizer) = twins(dtype, SGD)
    kept = fusedmlp.MainGradBuffer(model.parameters())
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        optimizer.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            x, dy = batch(seed, dtype)
            (compiled(x) * dy).sum().backward()
        set_grads(reference, sums(reference, (2 * step, 2 * step + 1)))
        expected.step()
        optimizer.step()
        assert_same(model, reference, dtype)
    assert kept.norm() > 0


def test_a_gradient_that_was_set_by_hand_counts():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([param], lr=1.0)
    buffer = fusedmlp.MainGradBuffer([param])
    for _ in range(2):
        buffer.zero_grad()
        param.grad = torch.full((4,), 3.0)
        assert buffer.clip_norm_(1e9) == 6
        assert buffer.flat.norm() == 6
        optimizer.step()
    assert (param == -6).all()


def test_flat_is_where_other_ranks_gradients_can_come_from():
    """An edit of `flat` counts also for a parameter that got no gradient on this rank."""
    param = torch.nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([param], lr=1.0)
    buffer = fusedmlp.MainGradBuffer([param])
    buffer.flat.add_(2)
    optimizer.step()
    assert (param == -2).all()


def test_a_module_that_moves_takes_its_gradients_out_of_the_buffer():
    model = Model()
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    backward(model, 1)
    model.bfloat16()
    for use in (buffer.norm, lambda: buffer.clip_norm_(1.0), lambda: buffer.flat):
        with pytest.raises(RuntimeError, match=r"params\[0\]: expected the main_grad that this buffer gave it"):
            use()
