"""Which gradient overwrites `main_grad`: the first to arrive of a step (`is_first_microbatch`), or of a backward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")

QUEUED = pytest.mark.parametrize("queued", [False, True])


def stale(layer):
    """`main_grad` still holds last step's gradient."""
    layer.attach(False)
    for param in layer.params:
        param.main_grad.fill_(float("nan"))


def forward(layer, seed, queue=None, **options):
    x, dy = layer.batch(seed)
    return layer(x, wgrad_queue=queue, **options), dy


@QUEUED
def test_the_first_gradient_to_arrive_overwrites_whichever_micro_batch_it_is_of(queued, make_layer, assert_close):
    layer, queue = make_layer(), fusedmlp.WgradQueue() if queued else None
    stale(layer)
    y1, dy1 = forward(layer, 1, queue, is_first_microbatch=True)
    y2, dy2 = forward(layer, 2, queue)
    y2.backward(dy2)
    y1.backward(dy1)
    if queue:
        queue.run()
    assert_close(layer.main_grads(), layer.wgrads(1, 2))


def test_a_first_micro_batch_whose_output_is_ignored(make_layer, assert_close):
    layer = make_layer()
    stale(layer)
    forward(layer, 1, is_first_microbatch=True)
    layer.backward(2)
    layer.backward(3)
    assert_close(layer.main_grads(), layer.wgrads(2, 3))


def test_a_first_micro_batch_without_gradient_does_not_erase_a_later_one(make_layer):
    layer = make_layer()
    stale(layer)
    layer.backward(1, is_first_microbatch=True)
    with torch.no_grad():
        forward(layer, 2, is_first_microbatch=True)
    before = [g.clone() for g in layer.main_grads()]
    with pytest.raises(RuntimeError, match=r"fc2_weight: a forward under torch.no_grad\(\) had is_first_microbatch"):
        layer.backward(2)
    assert all(torch.equal(a, b) for a, b in zip(layer.main_grads(), before, strict=True))


def test_an_evaluation_before_the_first_micro_batch_changes_nothing(make_layer, assert_close):
    layer = make_layer()
    stale(layer)
    with torch.no_grad():
        forward(layer, 2, is_first_microbatch=True)
    layer.backward(1, is_first_microbatch=True)
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(1, 2))


@pytest.mark.parametrize("mode", ["off", "grad"])
def test_a_gradient_that_is_not_fused_arms_nothing(mode, make_layer, assert_close):
    layer = make_layer()
    layer.attach(False)
    layer.backward(1, accumulate_wgrad=mode, is_first_microbatch=True)
    before = [g.clone() for g in layer.main_grads()]
    layer.backward(2)
    assert_close(layer.main_grads(), [b + g for b, g in zip(before, layer.wgrads(2), strict=True)])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_overwrite_main_grad_overwrites_once_in_nested_backwards(use_reentrant, depth, make_layer, assert_close):
    layer = make_layer()
    stale(layer)
    for param in layer.params:
        param.overwrite_main_grad = True

    def call(x, depth=depth):
        if depth == 0:
            return layer(x)
        return checkpoint(call, x, depth - 1, use_reentrant=use_reentrant)

    for seeds in ((1, 2), (3, 4)):  # a second backward overwrites again
        outputs, dys = [], []
        for x, dy in map(layer.batch, seeds):
            outputs.append(call(x.requires_grad_()))
            dys.append(dy)
        torch.autograd.backward(outputs, dys)
        assert_close(layer.main_grads(), layer.wgrads(*seeds))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_backward_that_failed_is_over(make_layer, assert_close):
    layer = make_layer()
    stale(layer)
    for param in layer.params:
        param.overwrite_main_grad = True

    def fail(_):
        raise ZeroDivisionError

    x, dy = layer.batch(1)
    x.requires_grad_().register_hook(fail)
    y = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ZeroDivisionError):
        y.backward(dy)
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))
