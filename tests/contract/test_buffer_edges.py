"""MainGradBuffer with gradients that are queued, expanded or missing: none is lost, and none is invented."""

import copy
import gc
import warnings

import pytest
import torch

import fusedmlp
from fusedmlp.operators import ops

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LAYERS = pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("moe", False)])
FUSE = pytest.mark.parametrize("fuse", [False, True])


def norm_of(tensors):
    return torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in tensors]))


# Queued gradients

USES = {
    "norm": lambda buffer: buffer.norm(),
    "clip_norm_": lambda buffer: buffer.clip_norm_(1e9),
    "flat": lambda buffer: buffer.flat,
    "zero_grad": lambda buffer: buffer.zero_grad(),
}
EACH_USE = pytest.mark.parametrize("use", USES)


@EACH_USE
@FUSE
@LAYERS
def test_a_gradient_that_is_still_queued_is_refused(kind, packed, fuse, use, make_layer, assert_close):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1)
    layer.backward(2, 3, wgrad_queue=queue)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"got one of params\[0\] that is still in a WgradQueue"):
            USES[use](buffer)
    assert_close(layer.grads(), layer.wgrads(1))  # also after zero_grad()
    if not fuse:
        queue.run_oldest()
        with pytest.raises(RuntimeError, match="still in a WgradQueue"):
            USES[use](buffer)
    queue.run()
    assert_close([buffer.norm()], [norm_of(layer.wgrads(1, 2, 3))])
    assert_close(layer.grads(), layer.wgrads(1, 2, 3))
    buffer.zero_grad()
    assert not buffer.flat.any()


@EACH_USE
@pytest.mark.parametrize("packed", [True, False])
def test_a_module_whose_backward_dw_was_forgotten(packed, use, assert_close):
    module = fusedmlp.GroupedMLP(3, 4, 5, packed=packed, delay_wgrad=True)
    plain = copy.deepcopy(module)
    plain.wgrad_queue = None
    buffer, x = fusedmlp.MainGradBuffer(module.parameters()), torch.randn(5, 4)
    module(x, [3, 0, 2]).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"still in a WgradQueue: call backward_dw\(\)"):
        USES[use](buffer)
    module.backward_dw()
    plain(x, [3, 0, 2]).square().sum().backward()
    grads = [p.grad for p in plain.parameters()]
    assert_close([buffer.clip_norm_(1e9)], [norm_of(grads)])
    assert_close([p.grad for p in module.parameters()], grads)
    buffer.zero_grad()


@EACH_USE
def test_a_cleared_queue_blocks_nothing(use, make_layer):
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1, wgrad_queue=queue)
    queue.clear()
    USES[use](buffer)
    assert buffer.flat.count_nonzero() == 0


@EACH_USE
def test_a_queue_that_failed_is_still_in_the_way(use, monkeypatch, make_layer):
    """It is unknown whether its gradient was added."""

    def fail(*_):
        raise torch.OutOfMemoryError

    layer, queue = make_layer(), fusedmlp.WgradQueue()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1, wgrad_queue=queue)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "grouped_wgrad_", fail)
        with pytest.raises(torch.OutOfMemoryError) as kept:
            queue.run()
    with pytest.raises(RuntimeError, match="still in a WgradQueue"):
        USES[use](buffer)
    queue.clear()
    buffer.zero_grad()  # although the traceback, with every frame in it, is kept
    assert kept.value


@EACH_USE
def test_a_queued_gradient_of_another_buffer_does_not_disturb(use, make_layer, assert_close):
    layer, other, queue = make_layer(), make_layer(), fusedmlp.WgradQueue()
    buffer, _ = (fusedmlp.MainGradBuffer(each.params) for each in (layer, other))
    other.backward(1, wgrad_queue=queue)
    layer.backward(2)
    before = [main.clone() for main in layer.main_grads()]
    USES[use](buffer)
    assert buffer.flat.any() == (use != "zero_grad")
    assert_close(layer.grads(), [torch.zeros_like(b) for b in before] if use == "zero_grad" else before)
    queue.run()
    assert_close(other.main_grads(), other.wgrads(1))


@EACH_USE
def test_a_weight_without_a_gradient_in_the_queue_does_not_disturb(use, make_layer):
    """The weight in the buffer is frozen; the layer's other weight is queued, but in no buffer."""
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    buffer = fusedmlp.MainGradBuffer(layer.params[:1])
    layer.params[0].requires_grad_(False)
    layer.backward(1, wgrad_queue=queue)
    assert len(queue) == 1
    USES[use](buffer)
    queue.run()


def dropped(held):
    """Warnings when the last reference to a queue or module, that of a list, is dropped.

    Not that of an argument: where Dynamo evaluates frames, the caller keeps one.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held.clear()
        gc.collect()
    return [(warning.category, str(warning.message)) for warning in caught]


@FUSE
def test_a_queue_that_is_dropped_with_gradients_warns(fuse, make_layer):
    layer, held = make_layer(), [fusedmlp.WgradQueue(fuse_microbatches=fuse)]
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1, 2, wgrad_queue=held[0])
    ((category, message),) = dropped(held)
    assert category is RuntimeWarning
    assert "got weight gradients that wait in it, 4 of them, which are lost (fc1_weight, fc2_weight)" in message
    buffer.zero_grad()  # no gradient waits any more


def test_a_module_that_is_dropped_with_gradients_warns():
    held = [fusedmlp.GroupedMLP(3, 4, 5, delay_wgrad=True)]
    held[0](torch.randn(5, 4), [3, 0, 2]).sum().backward()
    ((category, _),) = dropped(held)
    assert category is RuntimeWarning


@pytest.mark.parametrize("end", ["never used", "run", "clear", "forward only"])
def test_an_empty_queue_is_dropped_in_silence(end, make_layer):
    layer, held = make_layer(), [fusedmlp.WgradQueue()]
    if end == "forward only":
        layer(layer.batch(1)[0], wgrad_queue=held[0])
    elif end != "never used":
        layer.backward(1, wgrad_queue=held[0])
        getattr(held[0], end)()
    assert dropped(held) == []


# Expanded gradients


def expanded(param, value):
    """The gradient of `value * param.sum()`: an expanded tensor."""
    (grad,) = torch.autograd.grad(param.sum(), param, torch.tensor(value))
    assert not any(grad.stride())
    return grad


def test_an_expanded_gradient_moves_into_the_memory(make_layer, assert_close):
    layer = make_layer()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    for seed in (1, 2):
        buffer.zero_grad()
        for param in layer.params:
            param.grad = expanded(param, 3.0)
        buffer.norm()
        layer.backward(seed)
        assert_close(layer.grads(), [g + 3 for g in layer.wgrads(seed)])


@pytest.mark.parametrize("use", ["clip_norm_", "detach"])
def test_an_expanded_gradient_is_moved_or_kept(use, assert_close):
    param = torch.nn.Parameter(torch.randn(3, 4))
    buffer = fusedmlp.MainGradBuffer([param])
    param.grad = expanded(param, 2.0)
    if use == "clip_norm_":
        assert_close([buffer.clip_norm_(1.0)], [torch.tensor(2 * 12**0.5)])
        assert_close([param.main_grad], [torch.full((3, 4), 12**-0.5)], dtype=torch.float16)
    else:
        buffer.detach()
        assert_close([param.grad], [torch.full((3, 4), 2.0)])


# Steps without gradients
