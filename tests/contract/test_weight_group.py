"""Facts that are kept of a weight in a buffer: every later change of its parameters is seen."""

import gc
import weakref

import pytest
import torch
from support.contract_helpers import DELAYED, PACKED, plus
from torch.nn import Parameter

import fusedmlp


def bound(layer):
    """A buffer whose weights have been in a step of two micro-batches, and are in no step now."""
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1, 2)
    buffer.zero_grad()
    return buffer


def hooked(layer, buffer):
    layer.params[-1].register_hook(lambda grad: 2 * grad)
    return [1] * (len(layer.params) - 1) + [2]


def frozen(layer, buffer):
    layer.params[-1].requires_grad_(False)
    return [1] * (len(layer.params) - 1) + [None]


def by_hand(layer, buffer):
    layer.params[-1].grad = torch.zeros_like(layer.params[-1])
    return [1] * len(layer.params)


def stepping(layer, buffer):
    """A closure runs while `.grad` is a rounded copy; nothing of the copy stays."""
    layer.backward(3)
    torch.optim.SGD(layer.params, lr=0.0).step(lambda: layer.params[0].sum())
    buffer.zero_grad()
    return [1] * len(layer.params)


def in_another_buffer(layer, buffer):
    buffer.detach()
    layer.other = fusedmlp.MainGradBuffer(layer.params)
    return [1] * len(layer.params)


def another_parameter(layer, buffer):
    """In the place of the last one; the first, which the layer still uses, stays in the buffer."""
    new = Parameter(layer.params[-1].detach().clone())
    layer.groups[-1][-1] = layer.params[-1] = new
    layer.other = fusedmlp.MainGradBuffer([new])
    return [1] * len(layer.params)


CHANGES = [frozen, by_hand, stepping, in_another_buffer, another_parameter]
CASES = [(hooked, False), *((change, delayed) for change in CHANGES for delayed in (False, True))]


@pytest.mark.parametrize(("change", "delayed"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@PACKED
def test_a_change_between_two_steps(packed, dtype, change, delayed, make_layer, assert_close):
    layer = make_layer("mlp", packed, dtype=dtype)
    factors = change(layer, bound(layer))
    layer.backward(1, 2, delayed=delayed)
    got, wgrads = layer.grads(), layer.wgrads(1, 2)
    assert [grad is None for grad in got] == [factor is None for factor in factors]
    pairs = [(g, f * w) for g, w, f in zip(got, wgrads, factors, strict=True) if f is not None]
    assert_close([g for g, _ in pairs], [w for _, w in pairs], dtype=dtype)


@DELAYED
def test_an_owner_that_takes_the_weights_over_gets_the_gradients(delayed, make_layer, assert_close):
    layer = make_layer(packed=False)
    _kept = bound(layer)
    before = layer.attach()
    layer.backward(1, 2, delayed=delayed)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))
    assert layer.grads() == [None] * len(layer.params)


def test_a_buffer_that_is_made_before_the_queue_runs(make_layer, assert_close):
    layer, queue = make_layer(packed=False), fusedmlp.WgradQueue()
    buffer = bound(layer)
    layer.backward(1, wgrad_queue=queue)
    buffer.detach()
    new = fusedmlp.MainGradBuffer(layer.params)
    queue.run()
    assert all(param.grad is param.main_grad for param in layer.params)
    assert_close(layer.grads(), layer.wgrads(1))
    new.flat.add_(1)
    assert_close(layer.grads(), [1 + w for w in layer.wgrads(1)])


def test_fewer_experts_of_the_same_parameters(make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    _kept = bound(layer)
    first, second, *_ = layer.params
    x, dy = torch.randn(3, 4), torch.randn(3, 5)
    fusedmlp.grouped_linear(x, [first, second], [1, 2]).backward(dy)
    assert_close(layer.grads()[:2], [dy[:1].T @ x[:1], dy[1:].T @ x[1:]])
    assert layer.grads()[2:] == [None] * (len(layer.params) - 2)


def test_buffers_of_two_dtypes_for_one_weight(make_layer, assert_close):
    """One GEMM writes in one dtype; gradients of the other experts are returned."""
    layer = make_layer("linear", packed=False, dtype=torch.bfloat16)
    _kept = [
        fusedmlp.MainGradBuffer(layer.params[:1], dtype=torch.bfloat16),
        fusedmlp.MainGradBuffer(layer.params[1:]),
    ]
    layer.backward(1, 2)
    assert [grad.dtype for grad in layer.grads()] == [torch.bfloat16, *[torch.float32] * (len(layer.params) - 1)]
    assert_close(layer.grads(), layer.wgrads(1, 2), dtype=torch.bfloat16)


@DELAYED
def test_a_weight_that_has_got_another_shape_is_refused(delayed, make_layer):
    """Its memory has the old one."""
    layer, queue = make_layer("linear"), fusedmlp.WgradQueue()
    _kept = bound(layer)
    (weight,) = layer.params
    weight.data = weight.data[:, :3]
    x, dy = layer.batch(1)

    def step():
        layer(x, wgrad_queue=queue if delayed else None).backward(dy[:, :3])
        queue.run()

    with pytest.raises(ValueError, match=r"expected main_grad of shape \(\d, 3, 4\); got \(\d, 5, 4\)"):
        step()
    queue.clear()


def test_memory_is_free_once_a_buffer_is_detached(make_layer):
    layer = make_layer(packed=False)
    buffer = bound(layer)
    memory = [weakref.ref(param.main_grad) for param in layer.params]
    buffer.detach()
    del buffer
    gc.collect()
    assert [ref() for ref in memory] == [None] * len(memory)
