"""The catch, which moves plain gradients of fused weights to `main_grad`: modes, threads, many backwards, hooks."""

import time
from functools import partial

import pytest
import torch
from support.contract_helpers import in_threads, plus, stale

pytestmark = [
    pytest.mark.usefixtures("nan_in_empty"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


def plain(layer):
    return sum(p.square().sum() for p in layer.params)


def of_plain(layer, times=1):
    return [2 * times * p.detach().double() for p in layer.params]


@pytest.mark.parametrize("around", ["inference_mode", "no_grad", "anomaly", "compiled autograd"])
def test_both_land_whatever_is_around_backward(around, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    layer.backward(2)
    for param in layer.params:
        param.grad = None  # as owners do
    x, dy = layer.batch(1)
    fused = around != "compiled autograd"  # it does not take None for one of two uses
    loss = plain(layer) + (layer(x) * dy).nansum() if fused else plain(layer)
    with {
        "inference_mode": torch.inference_mode,
        "no_grad": torch.no_grad,
        "anomaly": partial(torch.autograd.set_detect_anomaly, True),
        "compiled autograd": partial(torch._dynamo.compiled_autograd._enable, lambda graph: graph),
    }[around]():
        loss.backward()
    seeds = (1, 2) if fused else (2,)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(*seeds), of_plain(layer)))
    assert not any(p.grad.any() for p in layer.params)


def test_first_forwards_in_several_threads_make_one_catch(monkeypatch, make_layer, assert_close):
    """Registering it may take long. A second catch would be taken for a user's hook."""
    layer = make_layer()
    before, register = layer.attach(False), torch.Tensor.register_hook

    def slowly(tensor, hook):
        time.sleep(0.02)
        return register(tensor, hook)

    monkeypatch.setattr(torch.Tensor, "register_hook", slowly)
    in_threads(*(partial(layer.backward, seed) for seed in (1, 2, 3)))
    assert [len(p._backward_hooks) for p in layer.params] == [1] * len(layer.params)
    plain(layer).backward()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2, 3), of_plain(layer)))


@pytest.mark.parametrize("first", ["hook", "catch"])
def test_user_hooks_on_a_weight_beside_the_catch_are_still_refused(first, make_layer):
    layer = make_layer()
    layer.attach(False)
    if first == "catch":
        layer.backward(1)
    layer.params[-1].register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match="the parameter has a tensor hook"):
        layer.backward(1)


def test_user_hooks_see_plain_gradients_of_weights_that_are_not_fused(make_layer, assert_close):
    layer, seen = make_layer(), {}
    layer.attach(False)
    layer(layer.batch(1)[0])
    for i, param in enumerate(layer.params):
        param.register_hook(lambda grad, i=i: seen.setdefault(i, grad.clone()))
    layer.backward(1, accumulate_wgrad="off")
    assert_close([seen[i] for i in range(len(layer.params))], layer.wgrads(1))
    assert_close(layer.grads(), layer.wgrads(1))


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
