"""Steps of a `MainGradBuffer` without an optimizer: how they begin, and how they end in `as_grad()`."""

from functools import partial

import pytest
import torch
from support.loops import CLOSURES, DTYPES, Model, assert_same, backward, batch, sums, twins

import fusedmlp


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_is_first_microbatch_begins_the_step_of_the_whole_buffer(checkpointed, flag):
    """Biases and the router begin, too, and do not add up over steps; a weight frozen meanwhile keeps no gradient."""
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


def test_is_first_microbatch_overwrites_what_was_written_by_hand(make_layer, assert_close):
    layer = make_layer()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    buffer.flat.fill_(torch.nan)
    layer.backward(1, is_first_microbatch=True)
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(1, 2))


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


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_step_begins_for_all_where_the_first_layer_had_no_gradient_in_the_last(with_optimizer):
    """`is_first_microbatch` is the only sign of the step; other gradients would count twice without it."""
    model, other = Model(), torch.nn.Parameter(torch.ones(3))
    params = [*model.parameters(), other]
    optimizer = torch.optim.SGD(params, lr=0.0)
    buffer = fusedmlp.MainGradBuffer(params, optimizer=optimizer if with_optimizer else None)
    for step in range(3):
        y = model(next(iter(batch(step))), is_first_microbatch=True)
        ((y.detach() if step == 1 else y).sum() + other.sum()).backward()
        with buffer.as_grad():
            assert torch.equal(other.grad, torch.ones(3)), step
            optimizer.step()


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
        backward(model, seed, is_first_microbatch=True)
        with buffer.as_grad():
            torch.nn.utils.clip_grad_norm_(params, 1e9)
        backward(other, seed, is_first_microbatch=True)
        with buffer.as_grad():
            for each in (model, other):
                for param, want in zip(each.parameters(), sums(Model(accumulate="off"), [seed]), strict=True):
                    torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-5)
            torch.optim.SGD(params, lr=0.0).step()
