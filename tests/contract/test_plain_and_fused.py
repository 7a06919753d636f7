"""Guard 10 where one of the two uses of a weight is plain PyTorch's."""

import pytest
import torch
from support.contract_helpers import plus

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")


def loss(layer, seed, **options):
    """A loss of the fused layer and of a plain use of every weight, in an order that the seed decides."""
    x, dy = layer.batch(seed)
    fused = (layer(x, **options) * dy).nansum()
    plain = sum((seed * p.square()).sum() for p in layer.params)
    return fused + plain if seed % 2 else plain + fused


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("owner", ["goes by the flag", "adds .grad itself", "has no flag"])
def test_both_land_where_the_owner_looks(owner, delayed, packed, make_layer, assert_close):
    layer, queue = make_layer(packed=packed), fusedmlp.WgradQueue() if delayed else None
    before = layer.attach(None if owner == "has no flag" else False)
    for param in layer.params:
        param.zero_out_wgrad = owner == "adds .grad itself"
    for seed in (1, 2):
        loss(layer, seed, wgrad_queue=queue).backward()
    if queue is not None:
        queue.run()
    plain, fused = [6 * p.detach() for p in layer.params], plus(before, layer.wgrads(1, 2))
    if owner == "goes by the flag":
        assert_close(layer.main_grads(), plus(fused, plain))
        assert not any(p.grad.any() for p in layer.params)
    else:
        assert_close(layer.main_grads(), fused)
        assert_close(layer.grads(), plain)


@pytest.mark.parametrize("owner_adds", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
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
        sum(p.square().sum() for p in layer.params).backward()
    queue.run()


@pytest.mark.parametrize("flag", [False, True])
def test_a_backward_without_the_layer_goes_where_the_owner_looks(flag, make_layer, assert_close):
    """The owner drops `.grad` while the flag says that the gradient of this step is in main_grad."""
    layer = make_layer()
    before = layer.attach(False)
    layer.backward(1)
    for param in layer.params:
        param.grad, param.grad_added_to_main_grad = None, flag
    sum(p.square().sum() for p in layer.params).backward()
    squares = [2 * p.detach() for p in layer.params]
    assert_close(layer.grads(), [0 * g for g in squares] if flag else squares)
    expected = [b + g + flag * s for b, g, s in zip(before, layer.wgrads(1), squares, strict=True)]
    assert_close(layer.main_grads(), expected)


def test_a_plain_gradient_before_the_first_that_overwrites_is_refused_where_the_owner_came_after_forward(make_layer):
    layer = make_layer(packed=False)
    x, dy = layer.batch(1)
    y = layer(x)
    layer.attach(False)
    layer.params[-1].square().sum().backward()
    with layer.overwriting(), pytest.raises(RuntimeError, match="with overwrite_main_grad: expected use by fused"):
        y.backward(dy)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_plain_gradient_before_the_first_that_overwrites_is_refused(delayed, make_layer):
    """No forward of the layer has registered the catch, and the owner, which goes by the flag, drops `.grad`."""
    layer, queue = make_layer(packed=False), fusedmlp.WgradQueue() if delayed else None
    before = layer.attach(False)
    layer.params[-1].square().sum().backward()
    with pytest.raises(RuntimeError, match=r"fc2_weight\[\d\] with overwrite_main_grad: expected use by fused"):
        layer.backward(1, wgrad_queue=queue, overwrites=True)
    assert not queue
    assert all(torch.equal(main, b) for main, b in zip(layer.main_grads(), before, strict=True))
    assert not any(param.grad_added_to_main_grad for param in layer.params)
    layer.params[-1].grad = None
    layer.backward(1, wgrad_queue=queue, overwrites=True)
    if queue is not None:
        queue.run()
