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
