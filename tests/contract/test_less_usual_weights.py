"""Weights that are not simply trained leaves of one kind: where their gradients go, and what an error leaves behind."""

import pytest
import torch

import fusedmlp


def test_auto_is_decided_for_each_expert_of_which_some_are_no_leaves(make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    factor = torch.ones((), requires_grad=True)
    layer.groups[0][1] = layer.params[1] * factor
    for i in (0, 2):
        layer.params[i].main_grad = torch.zeros_like(layer.params[i])
    layer.backward()
    assert_close([layer.params[0].main_grad, layer.params[1].grad, layer.params[2].main_grad], layer.wgrads())
    assert layer.params[0].grad is None
    with pytest.raises(RuntimeError, match=r"weight\[1\]: accumulate_wgrad='main_grad' needs a leaf parameter"):
        layer.backward(accumulate_wgrad="main_grad")


def test_a_list_with_a_computed_expert_is_not_delayed(make_layer, assert_close):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue()
    leaf = torch.nn.Parameter(layer.params[2].detach() / 2)
    layer.groups[0][2] = leaf * 2
    layer.backward(1, wgrad_queue=queue)
    assert len(queue) == 0
    wgrads = layer.wgrads(1)
    assert_close([layer.params[0].grad, layer.params[1].grad, leaf.grad], [*wgrads[:2], 2 * wgrads[2]])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("attached", [True, False])
def test_micro_batches_of_other_experts_do_not_share_a_launch(attached, order, make_layer, assert_close):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue(fuse_microbatches=True)
    before = layer.attach(False) if attached else [torch.zeros_like(p) for p in layer.params]
    for inputs in [(layer.params[:1], None)[i] for i in order]:
        x, dy = layer.batch(1)
        layer(x, wgrad_queue=queue).backward(dy, inputs=inputs)
    queue.run()
    wgrads = [b + n * g for b, n, g in zip(before, [2, 1, 1], layer.wgrads(1), strict=True)]
    assert_close(layer.main_grads() if attached else layer.grads(), wgrads)


def test_the_frozen_expert_does_not_decide_the_dtype(make_layer, assert_close):
    layer = make_layer("linear", packed=False, dtype=torch.bfloat16)
    layer.params[0].requires_grad_(False)
    for param in layer.params[1:]:
        param.grad_dtype = torch.float32
    layer.backward(1, delayed=True)
    assert [p.grad.dtype for p in layer.params[1:]] == [torch.float32] * 2
    assert_close([p.grad for p in layer.params[1:]], layer.wgrads(1)[1:], dtype=torch.bfloat16)


def test_a_hook_on_an_expert_without_gradient_is_no_reason_to_refuse(make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    before = layer.attach(False)
    layer.params[1].register_hook(lambda g: g)
    layer.params[1].requires_grad_(False)
    layer.backward(1, delayed=True)
    assert_close(layer.main_grads()[:1], [before[0] + layer.wgrads(1)[0]])


def test_a_new_buffer_may_follow_one_that_was_not_detached(make_layer, assert_close):
    layer = make_layer()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1)
    del buffer
    for param in layer.params:
        del param.main_grad
        param.grad = None
    _kept = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))


def test_a_buffer_still_rounds_after_fp32_accumulation_of_its_parameters_ends():
    from fusedmlp.integrations.fp32_accumulation import FP32Accumulation

    layer = torch.nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    accumulation = FP32Accumulation(layer, optimizer)
    buffer = fusedmlp.MainGradBuffer(layer.parameters())  # noqa: F841 (kept)
    accumulation.remove()
    layer(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
