"""`.to_local()` of DTensor weights: the GEMM adds into the local tensor of an existing `.grad`, where it may."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.contract_helpers import in_threads, plus
from support.systems import distributed, one_rank
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fusedmlp.contract.destinations.destination import Route

START = 2.0


@pytest.fixture
def mesh():
    with one_rank() as made:
        yield made


@pytest.fixture(params=["auto", "grad"])
def mode(request):
    return request.param


@pytest.fixture
def layer(make_layer, mesh):
    """An MLP whose `.leaves` are DTensors with a `.grad`; it multiplies what `.use` makes of them."""
    made = make_layer("mlp")
    made.leaves = [nn.Parameter(distributed(mesh, p)) for p in made.params]
    for leaf in made.leaves:
        leaf.grad = torch.full_like(leaf, START)
    made.places = [leaf.grad._local_tensor.data_ptr() for leaf in made.leaves]
    use(made)
    return made


def use(layer, local=DTensor.to_local):
    layer.use([local(leaf) for leaf in layer.leaves])


def sums(layer):
    return [leaf.grad.to_local() for leaf in layer.leaves]


def expected(wgrads):
    return [START + w for w in wgrads]


def test_the_gemm_adds_into_the_local_tensor(mode, layer, wgrad_gemms, assert_close):
    fired = []
    for leaf in layer.leaves:
        leaf.register_post_accumulate_grad_hook(lambda leaf: fired.append(leaf.grad is not None))
    grads, wgrads = [leaf.grad for leaf in layer.leaves], layer.wgrads(1, 2)
    for seed in (1, 2):
        layer.backward(seed, accumulate_wgrad=mode)
        use(layer)
    assert {*wgrad_gemms.pointers} == {*layer.places}
    assert all(leaf.grad is grad for leaf, grad in zip(layer.leaves, grads, strict=True))
    assert fired == [True] * 4
    assert_close(sums(layer), expected(wgrads))


def test_autograd_notices_that_the_gemm_has_written(mode, layer):
    factor = torch.ones((), requires_grad=True)
    product = (factor * layer.leaves[0].grad.to_local()).sum() + (factor * layer.leaves[0].grad).to_local().sum()
    version = layer.leaves[0].grad._version
    layer.backward(accumulate_wgrad=mode)
    assert layer.leaves[0].grad._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_experts_with_a_tensor_each(mode, make_layer, mesh, wgrad_gemms, assert_close):
    """One has a hook, which must get its gradient; GEMMs add to the others', which are sharded over features."""
    layer, seen = make_layer("mlp", packed=False), []
    wgrads = layer.wgrads()
    leaves = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(1)])) for p in layer.params]
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, START)
    places = [leaf.grad._local_tensor.data_ptr() for leaf in leaves]
    leaves[1].register_hook(lambda grad: seen.append(grad) or 3 * grad)
    layer.use([leaf.to_local() for leaf in leaves])
    layer.backward(accumulate_wgrad=mode)
    assert {*wgrad_gemms.pointers} & {*places} == {*places} - {places[1]}
    assert len(seen) == 1
    wgrads[1] = 3 * wgrads[1]
    assert_close([leaf.grad.to_local() for leaf in leaves], expected(wgrads))


def test_a_first_gradient_is_taken_over(mode, layer, wgrad_gemms, assert_close):
    for leaf in layer.leaves:
        leaf.grad = None
    layer.backward(accumulate_wgrad=mode)
    assert [leaf.grad._local_tensor.data_ptr() for leaf in layer.leaves] == wgrad_gemms.pointers
    assert_close(sums(layer), layer.wgrads())


def test_a_first_gradient_in_float32_is_not_rounded(mode, layer, mesh, assert_close):
    wgrads = layer.wgrads()
    layer.leaves = [nn.Parameter(leaf.detach().bfloat16()) for leaf in layer.leaves]
    for leaf in layer.leaves:
        leaf.grad_dtype = torch.float32
    use(layer)
    x, dy = (t.bfloat16() for t in layer.batch(1))
    layer(x, accumulate_wgrad=mode, recipe="bf16").backward(dy)
    for summed, wgrad in zip(sums(layer), wgrads, strict=True):
        assert summed.dtype == torch.float32
        assert not torch.equal(summed, summed.bfloat16().float())
        torch.testing.assert_close(summed.double(), wgrad, rtol=0.05, atol=0.05)


def replicate(layer, mesh, seen):
    layer.leaves = [nn.Parameter(leaf.detach().redistribute(mesh, [Replicate()])) for leaf in layer.leaves]
    for leaf in layer.leaves:
        leaf.grad = torch.full_like(leaf, START)
    use(layer)


def replicate_grad(layer, mesh, seen):
    for leaf in layer.leaves:
        leaf.grad = leaf.grad.redistribute(mesh, [Replicate()])


def hook(layer, mesh, seen):
    use(layer, lambda leaf: leaf.register_hook(lambda g: seen.append(g)) and leaf.to_local())


# Gradients that are returned: what flows to `.to_local()` is read, or is not the whole gradient.
RETURNED = {
    "a tensor hook on the leaf": hook,
    "a part of a sum": lambda layer, *_: use(layer, lambda leaf: leaf.to_local(grad_placements=[Partial()])),
    "more than to_local": lambda layer, *_: use(layer, lambda leaf: leaf.to_local() * 1),
    "a DTensor that is no leaf": lambda layer, *_: use(layer, lambda leaf: (leaf * 1).to_local()),
    "a replicated weight": replicate,
    "a grad with other placements": replicate_grad,
}


@pytest.mark.parametrize("what", RETURNED)
def test_pytorch_adds_where_a_gemm_may_not(what, mode, layer, mesh, wgrad_gemms, assert_close):
    seen, wgrads = [], layer.wgrads()
    RETURNED[what](layer, mesh, seen)
    places = {leaf.grad._local_tensor.data_ptr() for leaf in layer.leaves}
    layer.backward(accumulate_wgrad=mode)
    assert not {*wgrad_gemms.pointers} & places
    assert len(seen) == (2 if "hook" in what else 0)
    assert_close([leaf.grad.full_tensor() for leaf in layer.leaves], expected(wgrads))


def test_hooks_of_the_local_tensor_get_the_gradient(mode, layer, assert_close):
    seen, wgrads = [], layer.wgrads()
    layer.params[0].register_hook(lambda grad: seen.append(grad.clone()) or 3 * grad)
    layer.params[1].retain_grad()
    layer.backward(accumulate_wgrad=mode)
    assert_close([*seen, layer.params[1].grad], wgrads)
    assert_close(sums(layer), expected([3 * wgrads[0], wgrads[1]]))


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant", "save_on_cpu", "hook in a checkpoint"])
def test_recomputed_and_offloaded_weights(kind, mode, layer, wgrad_gemms, assert_close):
    wgrads, (x, dy), hooked = layer.wgrads(), layer.batch(1), "hook" in kind

    def run(x):
        use(layer)
        for weight in layer.params if hooked else []:
            weight.register_hook(lambda grad: 3 * grad)
        return layer(x, accumulate_wgrad=mode)

    with save_on_cpu() if kind == "save_on_cpu" else nullcontext():
        call = run if kind == "save_on_cpu" else partial(checkpoint, run, use_reentrant=kind == "reentrant")
        y = call(x.requires_grad_())
    y.backward(dy)
    assert hooked or {*wgrad_gemms.pointers} == {*layer.places}
    assert_close(sums(layer), expected([3 * w if hooked else w for w in wgrads]))


def test_two_uses_and_another_term(mode, layer, assert_close):
    """The same local tensors twice, new ones, and a term that autograd differentiates, in one backward."""
    wgrads = plus(layer.wgrads(1), layer.wgrads(2), layer.wgrads(3))
    ys = []
    for seed in (1, 2, 3):
        x, dy = layer.batch(seed)
        ys.append((layer(x, accumulate_wgrad=mode) * dy).sum())
        if seed == 2:
            use(layer)
    (sum(ys) + sum(w.sum() for w in layer.params)).backward()
    assert_close(sums(layer), expected([1 + w for w in wgrads]))


def test_captured_gradients_leave_grad_alone(mode, layer, assert_close):
    wgrads, (x, dy) = layer.wgrads(), layer.batch(1)
    for inputs in (layer.leaves, layer.params, [*layer.leaves, *layer.params]):
        found = torch.autograd.grad(layer(x, accumulate_wgrad=mode), inputs, dy)
        found = [g.to_local() if isinstance(g, DTensor) else g for g in found]
        assert_close(found, wgrads * (len(inputs) // len(wgrads)))
    assert_close(sums(layer), expected([0 * w for w in wgrads]))


def test_backward_of_some_inputs(mode, layer, assert_close):
    wgrads, (x, dy) = layer.wgrads(), layer.batch(1)
    layer(x, accumulate_wgrad=mode).backward(dy, inputs=[layer.leaves[0]])
    assert_close(sums(layer), expected([wgrads[0], 0 * wgrads[1]]))
    layer(x, accumulate_wgrad=mode).backward(dy, inputs=[*layer.leaves, *layer.params])
    assert_close(sums(layer), expected([2 * wgrads[0], wgrads[1]]))
    assert_close([w.grad for w in layer.params], wgrads)
    y = layer(x, accumulate_wgrad=mode)
    layer.leaves[0].requires_grad_(False)
    y.backward(dy)
    assert_close(sums(layer), expected([2 * wgrads[0], 2 * wgrads[1]]))


def test_other_threads_wait_while_a_gemm_adds(mode, layer, monkeypatch):
    held = []
    monkeypatch.setattr(Route, "hold_others", lambda route, params: held.extend(params) or setattr(route, "held", []))
    layer.backward(accumulate_wgrad=mode)
    assert [*map(id, held)] == [*map(id, reversed(layer.leaves))]


def test_two_threads_at_once(mode, layer, assert_close):
    wgrads = plus(*(layer.wgrads(seed) for seed in range(8)))
    ys = [layer(layer.batch(seed)[0], accumulate_wgrad=mode) for seed in range(8)]
    in_threads(*(lambda y=y, seed=seed: y.backward(layer.batch(seed)[1]) for seed, y in enumerate(ys)))
    assert_close(sums(layer), expected(wgrads))
