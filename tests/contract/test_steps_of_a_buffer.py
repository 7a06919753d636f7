"""Steps of a `MainGradBuffer` without an optimizer: how they begin, and how they end in `as_grad()`."""

from functools import partial

import pytest
import torch
from support.loops import CLOSURES, DTYPES, Model, assert_same, backward, sums, twins

import fusedmlp


def test_a_stale_gradient_of_another_queue_is_not_added_later():
    model, queue = Model(), fusedmlp.WgradQueue()
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    model.experts.wgrad_queue = queue
    backward(model, 1)
    model.experts.wgrad_queue = None
    with pytest.raises(RuntimeError, match=r"zero_\(\): expected every gradient .*; got one of params\[2\]"):
        buffer.zero_()
    queue.clear()
    buffer.zero_()
    backward(model, 2)
    with buffer.as_grad():
        for param, want in zip(model.parameters(), sums(Model(accumulate="off"), [2]), strict=True):
            torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5)


def test_an_owner_by_the_flag_gets_a_plain_gradient_of_an_earlier_micro_batch_too(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    for param in layer.params:
        (param * 2).sum().backward()
    layer.backward(1)
    layer.backward(2)
    assert_close(layer.main_grads(), [b + 2 + w for b, w in zip(before, layer.wgrads(1, 2), strict=True)])
    assert not any(grad.any() for grad in layer.grads())


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
@CLOSURES
def test_a_closure_inside_as_grad(make_optimizer, flag):
    (reference, expected), (model, optimizer) = twins(torch.float32, make_optimizer)
    buffer = fusedmlp.MainGradBuffer(model.parameters(), grad_added_to_main_grad=flag)

    def closure(model, optimizer):
        optimizer.zero_grad()
        return sum(backward(model, seed) for seed in (1, 2))

    for _ in range(2):
        buffer.zero_()
        backward(model, 5)  # the closure discards this gradient
        with buffer.as_grad():
            optimizer.step(partial(closure, model, optimizer))
        expected.step(partial(closure, reference, expected))
    assert_same(model, reference, torch.bfloat16 if make_optimizer.func is torch.optim.LBFGS else torch.float32)


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("in_closure", [False, True])
def test_a_backward_inside_as_grad_of_16_bit_weights_is_refused(in_closure, has_gradient):
    model = Model(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    if has_gradient:
        backward(model, 5)
    with pytest.raises(RuntimeError, match=r"a backward inside as_grad\(\): expected weights in the"):
        with buffer.as_grad():
            optimizer.step(lambda: backward(model, 1)) if in_closure else backward(model, 1)


def test_flat_shows_plain_gradients_and_takes_edits():
    param = torch.nn.Parameter(torch.zeros(64))
    buffer = fusedmlp.MainGradBuffer([param])
    param.sum().backward()
    assert buffer.flat.sum() == 64
    buffer.flat.mul_(0.5)
    with buffer.as_grad():
        assert (param.grad == 0.5).all()


def test_a_plain_gradient_of_a_block_is_not_stepped_past():
    param = torch.nn.Parameter(torch.zeros(4))
    buffer, optimizer = fusedmlp.MainGradBuffer([param]), torch.optim.SGD([param], lr=1.0)
    with buffer.as_grad():
        param.sum().backward()
    with pytest.raises(RuntimeError, match="got one that is in main_grad"):
        optimizer.step()
    with buffer.as_grad():
        optimizer.step()
    assert (param == -1).all()


def test_a_hook_that_runs_after_the_catch_is_refused(make_layer):
    layer = make_layer("linear")
    fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1)
    layer.params[0].register_hook(torch.zeros_like)
    with pytest.raises(RuntimeError, match=r"a parameter: the parameter has a tensor hook \(register_hook\)"):
        layer.params[0].sum().backward()


@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16])
def test_weights_whose_gradients_may_have_any_dtype(grad_dtype, make_layer):
    layer = make_layer("linear", dtype=torch.bfloat16)
    (param,) = layer.params
    param.grad_dtype = grad_dtype
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1)
    buffer.zero_()
    param.float().sum().backward()
    with buffer.as_grad():
        assert (param.grad == 1).all()


def test_a_block_that_fails_to_end_leaves_nothing_attached():
    table, weight = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Parameter(torch.zeros(2))
    params = [table.weight, weight]
    buffer, optimizer = fusedmlp.MainGradBuffer(params), torch.optim.SGD(params, lr=1.0)

    def block():
        with buffer.as_grad():
            optimizer.zero_grad()
            table(torch.tensor([1])).sum().backward()

    with pytest.raises(RuntimeError, match="sparse"):
        block()
    buffer.zero_()
    weight.sum().backward()
    with buffer.as_grad():
        optimizer.step()
    assert (weight == -1).all()


def test_a_block_that_clips_between_two_models_loses_nothing():
    model, other = Model(), Model()
    params = [*model.parameters(), *other.parameters()]
    buffer = fusedmlp.MainGradBuffer(params)
    for seed in (1, 2):
        buffer.zero_()
        backward(model, seed)
        with buffer.as_grad():
            torch.nn.utils.clip_grad_norm_(params, 1e9)
        backward(other, seed)
        with buffer.as_grad():
            for each in (model, other):
                for param, want in zip(each.parameters(), sums(Model(accumulate="off"), [seed]), strict=True):
                    torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5)
            torch.optim.SGD(params, lr=0.0).step()
