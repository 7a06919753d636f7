"""MainGradBuffer with gradients that are queued or expanded: none is lost, and none is invented."""

import gc
import warnings

import pytest
import torch
from support.contract_helpers import FUSE, failing
from support.contract_model import Boom

import fusedmlp
from fusedmlp.operators import ops

USES = {
    "norm": lambda buffer: buffer.norm(),
    "clip_norm_": lambda buffer: buffer.clip_norm_(1e9),
    "flat": lambda buffer: buffer.flat,
    "zero_grad": lambda buffer: buffer.zero_grad(),
}
EACH_USE = pytest.mark.parametrize("use", USES)


@EACH_USE
@FUSE
@pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("linear", False)])
@pytest.mark.parametrize("end", ["run", "clear", "fail"])
def test_a_gradient_that_is_still_queued_is_refused(end, kind, packed, fuse, use, make_layer, assert_close):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1)
    layer.backward(2, 3, wgrad_queue=queue)

    def is_refused():
        with pytest.raises(
            RuntimeError, match=r"got one of params\[0\] that is still in a WgradQueue: call backward_dw"
        ):
            USES[use](buffer)

    is_refused()
    is_refused()
    assert_close(layer.grads(), layer.wgrads(1))  # also after zero_grad()
    if end == "run":
        if not fuse:
            queue.run_oldest()
            is_refused()
        queue.run()
        assert_close(layer.grads(), layer.wgrads(1, 2, 3))
        norm = torch.linalg.vector_norm(torch.cat([w.flatten() for w in layer.wgrads(1, 2, 3)]))
        assert_close([buffer.norm()], [norm])
    elif end == "fail":  # it is unknown whether a gradient was added
        with failing(ops, "grouped_wgrad_"), pytest.raises(Boom) as kept:
            queue.run()
        is_refused()
    queue.clear()
    USES[use](buffer)
    buffer.zero_grad()  # although the traceback, with every frame in it, is kept
    assert not buffer.flat.any()
    assert end != "fail" or kept.value


@EACH_USE
def test_a_queued_gradient_of_another_buffer_does_not_disturb(use, make_layer, assert_close):
    layer, other, queue = make_layer(), make_layer(), fusedmlp.WgradQueue()
    buffer, _ = (fusedmlp.MainGradBuffer(each.params) for each in (layer, other))
    other.backward(1, wgrad_queue=queue)
    layer.backward(2)
    USES[use](buffer)
    assert buffer.flat.any() == (use != "zero_grad")
    assert_close(layer.grads(), [(use != "zero_grad") * w for w in layer.wgrads(2)])
    queue.run()
    assert_close(other.grads(), other.wgrads(1))


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


@FUSE
@pytest.mark.parametrize("end", ["waiting", "never used", "run", "clear", "forward only"])
def test_a_queue_that_is_dropped_with_gradients_warns(end, fuse, make_layer):
    layer, held = make_layer(), [fusedmlp.WgradQueue(fuse_microbatches=fuse)]
    buffer = fusedmlp.MainGradBuffer(layer.params)
    if end == "forward only":
        layer(layer.batch(1)[0], wgrad_queue=held[0])
    elif end != "never used":
        layer.backward(1, 2, wgrad_queue=held[0])
    if end in ("run", "clear"):
        getattr(held[0], end)()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held.clear()
        gc.collect()
    found = [(warning.category, str(warning.message)) for warning in caught]
    if end == "waiting":
        ((category, message),) = found
        assert category is RuntimeWarning
        assert "got weight gradients that wait in it, 4 of them, which are lost (fc1_weight, fc2_weight)" in message
    else:
        assert found == []
    buffer.zero_grad()  # no gradient waits any more


@pytest.mark.parametrize("use", ["norm", "clip_norm_", "detach"])
def test_an_expanded_gradient_moves_into_the_memory_or_stays(use, make_layer, assert_close):
    layer = make_layer()
    buffer, norm = fusedmlp.MainGradBuffer(layer.params), 3 * sum(p.numel() for p in layer.params) ** 0.5
    for param in layer.params:
        (param.grad,) = torch.autograd.grad(param.sum(), param, torch.tensor(3.0))
        assert not any(param.grad.stride())
    if use == "detach":
        buffer.detach()
    else:
        assert_close([buffer.norm() if use == "norm" else buffer.clip_norm_(norm / 3)], [torch.tensor(norm)])
        assert all(param.grad is param.main_grad for param in layer.params)
    value = 1.0 if use == "clip_norm_" else 3.0
    assert_close(layer.grads(), [torch.full_like(p, value) for p in layer.params])
    layer.backward(1)
    assert_close(layer.grads(), [w + value for w in layer.wgrads(1)])
