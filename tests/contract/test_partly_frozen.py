"""Lists of experts whose tensors differ: some frozen, main_grads laid out in other ways."""

import pytest
import torch

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


@IMPLS
@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("existing", [True, False])
def test_the_other_experts_of_a_frozen_one_are_delayed(existing, attached, frozen, impl, make_layer, assert_close):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue()
    layer.params[frozen].requires_grad_(False)
    before = layer.attach(False) if attached else [torch.zeros_like(p) for p in layer.params]
    live = [i for i in range(3) if i != frozen]
    for i in live if existing and not attached else []:
        layer.params[i].grad = torch.full_like(before[i], 3.0)
        before[i] += 3
    for seed in (1, 2):
        layer.backward(seed, wgrad_queue=queue, impl=impl)
    assert len(queue) == 2
    if attached:
        assert_close(layer.main_grads(), before)
    queue.run()
    results, wgrads = layer.main_grads() if attached else layer.grads(), layer.wgrads(1, 2)
    assert_close([results[i] for i in live], [before[i] + wgrads[i] for i in live])
    assert layer.params[frozen].grad is None
    if attached:
        assert torch.equal(results[frozen], before[frozen])
        assert layer.params[frozen].grad_added_to_main_grad is False


@IMPLS
@pytest.mark.parametrize("frozen", [None, 0, 2])
def test_main_grads_laid_out_otherwise_than_their_weights(frozen, impl, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    before = layer.attach(False)
    for param in layer.params:
        param.main_grad = param.main_grad.t().contiguous().t()
    if frozen is not None:
        layer.params[frozen].requires_grad_(False)
    layer.backward(1, impl=impl)
    wgrads = [w if i != frozen else torch.zeros_like(w) for i, w in enumerate(layer.wgrads(1))]
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, wgrads, strict=True)])


@IMPLS
def test_main_grads_laid_out_each_in_its_own_way_are_refused(impl, make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach(False)
    layer.params[2].main_grad = layer.params[2].main_grad.t().contiguous().t()
    before = [g.clone() for g in layer.main_grads()]
    with pytest.raises(ValueError, match=r"weight\[2\]: expected a gradient with the strides of expert 0's, \(4, 1\)"):
        layer.backward(1, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(layer.main_grads(), before, strict=True))


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
    times = [2, 1, 1]
    wgrads = [b + n * g for b, n, g in zip(before, times, layer.wgrads(1), strict=True)]
    assert_close(layer.main_grads() if attached else layer.grads(), wgrads)


def test_the_frozen_expert_does_not_decide_the_dtype(make_layer, assert_close):
    layer, queue = make_layer("linear", packed=False, dtype=torch.bfloat16), fusedmlp.WgradQueue()
    layer.params[0].requires_grad_(False)
    for param in layer.params[1:]:
        param.grad_dtype = torch.float32
    layer.backward(1, wgrad_queue=queue)
    queue.run()
    assert [p.grad.dtype for p in layer.params[1:]] == [torch.float32] * 2
    assert_close([p.grad for p in layer.params[1:]], layer.wgrads(1)[1:], dtype=torch.bfloat16)


@IMPLS
def test_main_grads_with_gaps_between_rows(impl, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    layer.attach(False)
    rows, columns = layer.params[0].shape
    buffer = torch.ones(3, rows, columns + 3)
    for i, param in enumerate(layer.params):
        param.main_grad = buffer[i, :, :columns]
    layer.params[1].requires_grad_(False)
    layer.backward(1, impl=impl)
    expected = [1 + (g if i != 1 else torch.zeros_like(g)) for i, g in enumerate(layer.wgrads(1))]
    assert_close(layer.main_grads(), expected)
    assert (buffer[:, :, columns:] == 1).all()


def test_a_hook_on_an_expert_without_gradient_is_no_reason_to_refuse(make_layer, assert_close):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue()
    before = layer.attach(False)
    layer.params[1].register_hook(lambda g: g)
    layer.params[1].requires_grad_(False)
    layer.backward(1, wgrad_queue=queue)
    queue.run()
    assert_close(layer.main_grads()[:1], [before[0] + layer.wgrads(1)[0]])
