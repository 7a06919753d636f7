"""Guard 10 where one of the two uses of a weight is plain PyTorch's."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")


@pytest.fixture(params=[False, True], ids=["expanded dummy", "dense dummy"])
def dense(request, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_DENSE_DUMMY", str(int(request.param)))


def loss(layer, seed, **options):
    """A loss of the fused layer and of a plain use of every weight, in an order that the seed decides."""
    x, dy = layer.batch(seed)
    fused = (layer(x, **options) * dy).nansum()
    plain = sum((seed * p.square()).sum() for p in layer.params)
    return fused + plain if seed % 2 else plain + fused


def expected(layer, *seeds):
    return [
        g + sum(2 * seed * p.detach() for seed in seeds)
        for g, p in zip(layer.wgrads(*seeds), layer.params, strict=True)
    ]


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("delayed", [False, True])
def test_both_land_in_main_grad(delayed, packed, make_layer, assert_close):
    layer = make_layer(packed=packed)
    before = layer.attach(False)
    queue = fusedmlp.WgradQueue() if delayed else None
    for seed in (1, 2):
        loss(layer, seed, wgrad_queue=queue).backward()
    if queue:
        queue.run()
    assert_close(layer.main_grads(), [b + g for b, g in zip(before, expected(layer, 1, 2), strict=True)])
    assert all(p.grad is None or not p.grad.any() for p in layer.params)


@pytest.mark.usefixtures("dense")
def test_an_owner_that_adds_grad_itself_finds_the_plain_gradient_there(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    for param in layer.params:
        param.zero_out_wgrad = True
    loss(layer, 1).backward()
    assert_close(layer.main_grads(), [b + g for b, g in zip(before, layer.wgrads(1), strict=True)])
    assert_close(layer.grads(), [2 * p.detach() for p in layer.params])


def test_without_the_attribute_the_plain_gradient_is_in_grad(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(None)
    loss(layer, 1).backward()
    assert_close(layer.main_grads(), [b + g for b, g in zip(before, layer.wgrads(1), strict=True)])
    assert_close(layer.grads(), [2 * p.detach() for p in layer.params])


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


@pytest.mark.usefixtures("dense")
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


def test_nothing_of_the_catch_is_left_by_a_backward_that_failed(make_layer, assert_close):
    def fail(_):
        raise ZeroDivisionError

    layer = make_layer()
    before = layer.attach(False)
    accumulators = [torch.autograd.graph.get_gradient_edge(p).node for p in layer.params]
    x, dy = layer.batch(1)
    x = (x.nan_to_num() * layer.params[0].sum() * 0 + x).requires_grad_()  # a plain use, upstream
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        layer(x).backward(dy)
    for param in layer.params:
        param.main_grad.zero_()
        param.grad, param.grad_added_to_main_grad = None, False
    layer.backward(1, accumulate_wgrad="off")
    assert_close(layer.grads(), layer.wgrads(1))
    assert not any(g.any() for g in layer.main_grads())
    assert len(accumulators) == len(before) == 2


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("dense")
def test_plain_uses_inside_and_outside_of_a_checkpoint_all_land(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    one, (x, dy) = torch.ones((), requires_grad=True), layer.batch(1)

    def plain(scale):
        return sum(p.sum() for p in layer.params) * scale

    inside = checkpoint(plain, one, use_reentrant=True)
    (plain(1) + inside + (layer(x) * dy).nansum()).backward()
    assert_close(layer.main_grads(), [b + g + 2 for b, g in zip(before, layer.wgrads(1), strict=True)])
    assert all(p.grad is None or not p.grad.any() for p in layer.params)


def test_the_buffer_steps_with_both(make_layer, assert_close):
    layer = make_layer()
    fusedmlp.MainGradBuffer(layer.params)
    loss(layer, 1).backward()
    assert_close(layer.grads(), expected(layer, 1))


def test_an_owner_by_the_flag_gets_a_plain_gradient_of_an_earlier_micro_batch_too(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    for param in layer.params:
        (param * 2).sum().backward()
    layer.backward(1)
    layer.backward(2)
    assert_close(layer.main_grads(), [b + 2 + w for b, w in zip(before, layer.wgrads(1, 2), strict=True)])
    assert not any(grad.any() for grad in layer.grads())
