"""The gradient that overwrites `main_grad`: the first to arrive of a step of a buffer, or of a backward."""

import threading
from functools import partial

import pytest
import torch
from support.contract_helpers import failing, one_backward, stale, stale_buffer
from support.contract_model import Boom
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.operators import ops


@pytest.mark.parametrize("owner", ["buffer", "overwrite_main_grad"])
def test_a_first_micro_batch_whose_gemm_fails_has_not_arrived(owner, make_layer, assert_close):
    layer = make_layer()
    if owner == "buffer":
        _kept = stale_buffer(layer.params)
    else:
        stale(layer)
    options = {"overwrites": owner == "overwrite_main_grad"}
    with failing(ops, "grouped_mlp_backward_"), pytest.raises(Boom):
        layer.backward(1, **options)
    layer.backward(2, **options)
    layer.backward(3)
    assert_close(layer.main_grads(), layer.wgrads(2, 3))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_an_owner_that_takes_main_grad_away_within_a_backward(make_layer, assert_close):
    layer = stale(make_layer("linear"), overwrites=True)
    (param,) = layer.params
    total = torch.zeros_like(param)

    def hand_over(_):
        total.add_(param.main_grad)
        param.main_grad = torch.full_like(param.main_grad, float("nan"))
        param.grad, param.grad_added_to_main_grad = None, False

    param.register_post_accumulate_grad_hook(hand_over)
    one_backward(layer, 1, 2, call=partial(checkpoint, layer, use_reentrant=True))
    assert_close([total], layer.wgrads(1, 2))


def test_a_backward_in_another_thread_is_not_an_outer_one(make_layer, assert_close):
    other, layer = (stale(make_layer(), overwrites=True) for _ in range(2))
    inside, done = threading.Event(), threading.Event()
    for param in other.params + layer.params:
        del param.grad_added_to_main_grad

    def wait(_):
        inside.set()
        done.wait(600)

    def run():
        x, dy = other.batch(1)
        x.requires_grad_().register_hook(wait)
        other(x).backward(dy)

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(600)
    for seed in (1, 2, 3):
        layer.backward(seed)
        assert_close(layer.main_grads(), layer.wgrads(seed))
    done.set()
    thread.join()


def test_fused_microbatches_on_both_sides_of_another_queues_overwrite(make_layer, assert_close):
    layer = stale(make_layer())
    fusing, other = fusedmlp.WgradQueue(fuse_microbatches=True), fusedmlp.WgradQueue()
    layer.backward(1, wgrad_queue=fusing)
    layer.backward(2, wgrad_queue=other, overwrites=True)
    layer.backward(3, wgrad_queue=fusing)
    with pytest.raises(RuntimeError, match="a queued gradient is going to overwrite main_grad, and would erase"):
        fusing.run()  # erasing the first gradient is right, but the third would be erased, too
    fusing.clear()
    layer.backward(4, wgrad_queue=fusing)
    other.run()
    fusing.run()
    assert_close(layer.main_grads(), layer.wgrads(2, 4))


def test_an_overwrite_waiting_for_main_grad_does_not_concern_grad(make_layer, assert_close):
    layer = make_layer()
    layer.attach(False)
    queue = fusedmlp.WgradQueue()
    layer.backward(1, wgrad_queue=queue, overwrites=True)
    for param in layer.params:
        param.grad = torch.zeros_like(param)
    layer.backward(2, accumulate_wgrad="grad")
    queue.run()
    assert_close(layer.grads(), layer.wgrads(2))
    assert_close(layer.main_grads(), layer.wgrads(1))
