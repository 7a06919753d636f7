"""Guard 10 where one of two uses of a weight is plain PyTorch's: its gradient is caught, and moved to `main_grad`."""

import time
from functools import partial

import pytest
import torch
from support.contract_helpers import DELAYED, PACKED, in_threads, of_plain, plain, plus, stale, unchanged

import fusedmlp
from fusedmlp.contract import parameter_state

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def loss(layer, seed, **options):
    """A loss of the fused layer and of a plain use of every weight, made in an order that the seed decides."""
    x, dy = layer.batch(seed)
    early = plain(layer, seed) if seed % 2 else None
    fused = (layer(x, **options) * dy).nansum()
    return fused + (plain(layer, seed) if early is None else early)


@PACKED
@DELAYED
@pytest.mark.parametrize("owner", ["goes by the flag", "adds .grad itself", "has no flag"])
def test_both_land_where_the_owner_looks(owner, delayed, packed, make_layer, assert_close):
    layer, queue = make_layer(packed=packed), fusedmlp.WgradQueue()
    before = layer.attach(None if owner == "has no flag" else False)
    for param in layer.params:
        param.zero_out_wgrad = owner == "adds .grad itself"
    for seed in (1, 2):
        loss(layer, seed, wgrad_queue=queue if delayed else None).backward()
    queue.run()
    fused = plus(before, layer.wgrads(1, 2))
    if owner == "goes by the flag":
        assert_close(layer.main_grads(), plus(fused, of_plain(layer, 1, 2)))
        assert not any(p.grad.any() for p in layer.params)
    else:
        assert_close(layer.main_grads(), fused)
        assert_close(layer.grads(), of_plain(layer, 1, 2))


@pytest.mark.parametrize("around", ["inference_mode", "no_grad", "anomaly", "compiled autograd"])
def test_both_land_whatever_is_around_backward(around, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    layer.backward(2)
    for param in layer.params:
        param.grad = None  # as owners do
    fused = around != "compiled autograd"  # it does not take None for one of two uses
    total = loss(layer, 1) if fused else plain(layer)
    with {
        "inference_mode": torch.inference_mode,
        "no_grad": torch.no_grad,
        "anomaly": partial(torch.autograd.set_detect_anomaly, True),
        "compiled autograd": partial(torch._dynamo.compiled_autograd._enable, lambda graph: graph),
    }[around]():
        total.backward()
    seeds = (1, 2) if fused else (2,)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(*seeds), of_plain(layer)))
    assert not any(p.grad.any() for p in layer.params)


# A backward of plain PyTorch alone


@pytest.mark.parametrize("way", ["hooks cleared", "hooks None", "no main_grad before"])
def test_a_later_forward_sees_that_plain_gradients_are_not_caught(way, make_layer, assert_close):
    layer, (x, _) = make_layer("linear", packed=False), make_layer("linear").batch(1)
    if way == "no main_grad before":
        layer(x, wgrad_queue=fusedmlp.WgradQueue())  # passes all checks
        before = layer.attach(True)
    else:
        layer.attach(False)
        layer.backward(1)
        before = [main.clone() for main in layer.main_grads()]
    for param in layer.params:
        param.grad = None  # as an owner does that sees the flag
        if way == "hooks cleared":
            param._backward_hooks.clear()
        elif way == "hooks None":
            param._backward_hooks = None
    layer(x)
    plain(layer).backward()
    assert_close(layer.main_grads(), plus(before, of_plain(layer)))


def test_what_somebody_asks_for_is_not_caught(make_layer, assert_close):
    """`autograd.grad` returns the gradient, also while the flag is set and an overwrite is pending."""
    layer = stale(make_layer(), overwrites=True)
    layer.backward(1)
    assert_close(torch.autograd.grad(plain(layer), layer.params), of_plain(layer))
    assert_close(layer.main_grads(), layer.wgrads(1))
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))


def test_a_weight_that_lost_its_main_grad_is_let_alone(make_layer, assert_close):
    layer = make_layer()
    layer.attach(False)
    layer.backward(1)
    layer.params[0].main_grad = None
    layer.params[0].grad_added_to_main_grad = True
    layer.params[0].grad = None
    layer.params[0].square().sum().backward()
    assert_close(layer.grads()[:1], of_plain(layer)[:1])


# Gradients that overwrite


@pytest.mark.parametrize("owner_adds", [False, True])
@DELAYED
@pytest.mark.parametrize("seed", [1, 2])
def test_a_plain_gradient_that_an_overwriting_one_could_erase_is_refused(seed, delayed, owner_adds, make_layer):
    layer, queue = make_layer(), fusedmlp.WgradQueue() if delayed else None
    layer.attach(False)
    for param in layer.params:
        param.zero_out_wgrad = owner_adds
    with layer.overwriting(), pytest.raises(RuntimeError, match="overwrite_main_grad: expected use by fusedmlp layers"):
        loss(layer, seed, wgrad_queue=queue).backward()
    if queue:
        queue.clear()


def test_a_plain_gradient_before_a_queue_that_is_going_to_overwrite_is_refused(make_layer):
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    layer.attach(False)
    layer.backward(1, wgrad_queue=queue, overwrites=True)
    with pytest.raises(RuntimeError, match="a queued gradient is going to overwrite main_grad, and would erase"):
        plain(layer).backward()
    queue.run()


@DELAYED
@pytest.mark.parametrize("owner_comes", ["before forward", "after forward"])
def test_a_plain_gradient_before_the_first_that_overwrites_is_refused(owner_comes, delayed, make_layer):
    """No forward of the layer has registered the catch, and the owner, which goes by the flag, drops `.grad`."""
    layer, queue = make_layer(packed=False), fusedmlp.WgradQueue() if delayed else None
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue) if owner_comes == "after forward" else None
    before = layer.attach(False)
    layer.params[-1].square().sum().backward()
    y = layer(x, wgrad_queue=queue) if y is None else y
    message = r"fc2_weight\[\d\] with overwrite_main_grad: expected use by fused"
    with layer.overwriting(), pytest.raises(RuntimeError, match=message):
        y.backward(dy)
    assert not queue
    assert unchanged(layer.main_grads(), before)
    assert not any(param.grad_added_to_main_grad for param in layer.params)
    layer.params[-1].grad = None
    layer.backward(1, delayed=delayed, overwrites=True)


# The hooks that catch


SLOW = {"the state of a parameter": (parameter_state, "ParameterState"), "its hook": (torch.Tensor, "register_hook")}


@pytest.mark.parametrize("what", SLOW)
def test_first_uses_in_several_threads_make_one_state_and_one_catch(what, monkeypatch, make_layer, assert_close):
    """Making one may take long. A second catch, or one of a second state, would be taken for a user's hook."""
    layer, (owner, name) = make_layer(), SLOW[what]
    before, make = layer.attach(False), getattr(owner, name)

    def slowly(*args):
        time.sleep(0.02)
        return make(*args)

    monkeypatch.setattr(owner, name, slowly)
    in_threads(*(partial(layer.backward, seed) for seed in (1, 2, 3)))
    assert [len(p._backward_hooks) for p in layer.params] == [1] * len(layer.params)
    plain(layer).backward()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2, 3), of_plain(layer)))


@PACKED
@pytest.mark.parametrize("mode", ["main_grad", "auto"])
@pytest.mark.parametrize("first", ["hook", "catch"])
def test_user_hooks_on_a_weight_beside_the_catch_are_still_refused(first, mode, packed, make_layer):
    layer = make_layer(packed=packed)
    layer.attach(False)
    if first == "catch":
        layer.backward(1)
    layer.params[-1].register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match="the parameter has a tensor hook"):
        layer.backward(1, accumulate_wgrad=mode)


def test_user_hooks_see_plain_gradients_of_weights_that_are_not_fused(make_layer, assert_close):
    layer, seen = make_layer(), {}
    layer.attach(False)
    layer(layer.batch(1)[0])
    for i, param in enumerate(layer.params):
        param.register_hook(lambda grad, i=i: seen.setdefault(i, grad.clone()))
    layer.backward(1, accumulate_wgrad="off")
    assert_close([seen[i] for i in range(len(layer.params))], layer.wgrads(1))
    assert_close(layer.grads(), layer.wgrads(1))
