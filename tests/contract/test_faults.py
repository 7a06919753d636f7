"""What a step that fails leaves behind: see docs/errors_in_backward.md."""

import contextlib

import pytest
import torch

import fusedmlp
from fusedmlp import ops

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False)]
)


class Boom(Exception):
    """What every fault here raises."""


def fail(*_):
    raise Boom


@contextlib.contextmanager
def failing(owner, name, *, after=False):
    """Inside, the next call of `owner.name` raises, before or after its effect; later ones work."""
    real = getattr(owner, name)

    def fails(*args, **options):
        setattr(owner, name, real)
        if after:
            real(*args, **options)
        raise Boom

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, real)


def plus(before, wgrads):
    return [b + w for b, w in zip(before, wgrads, strict=True)]


def outside(layer):
    """Everything that a backward may change outside of the graph, but for what main_grad holds."""
    return [(p.grad, getattr(p, "grad_added_to_main_grad", "none"), id(p.main_grad)) for p in layer.params]


# A queue whose GEMM failed

FUSE = pytest.mark.parametrize("fuse", [False, True])


@FUSE
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("run", ["run", "run_oldest"])
def test_a_queue_whose_gemm_failed_never_adds_it_again(run, after, fuse, make_layer, assert_close):
    layer, queue = make_layer(), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach(False)
    layer.backward(1, wgrad_queue=queue)
    with failing(ops, "grouped_wgrad_", after=after), pytest.raises(Boom):
        queue.run()
    held = [m.clone() for m in layer.main_grads()]
    with pytest.raises(RuntimeError, match=r"fc2_weight: .*may hold part of that gradient.*queue.clear\(\)"):
        getattr(queue, run)()
    assert all(torch.equal(m, h) for m, h in zip(layer.main_grads(), held, strict=True))
    assert len(queue) == 2
    queue.clear()
    assert len(queue) == 0
    for param, main in zip(layer.params, before, strict=True):
        param.main_grad.copy_(main)
    layer.backward(2, wgrad_queue=queue)
    getattr(queue, run)()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(2)))


@FUSE
def test_a_queue_that_failed_before_its_gemm_can_run_again(fuse, make_layer, assert_close):
    layer, queue = make_layer(), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach(False)
    layer.backward(1, 2, wgrad_queue=queue)
    param = layer.params[1]
    right, param.main_grad = param.main_grad, torch.zeros(3)
    with pytest.raises(ValueError, match="fc2_weight: expected main_grad of shape"):
        queue.run()
    param.main_grad = right
    assert len(queue) == 4
    queue.run()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))


def test_a_cleared_queue_overwrites_nothing(make_layer, assert_close):
    """Also while the error that made it necessary is kept, and with it every frame that it passed."""
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    layer.attach(False)
    layer.backward(1, wgrad_queue=queue, is_first_microbatch=True)
    with failing(ops, "grouped_wgrad_"), pytest.raises(Boom) as kept:
        queue.run()
    queue.clear()
    for main in layer.main_grads():
        main.zero_()
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))
    assert kept.value


# A layer's backward that failed

DELAYED = pytest.mark.parametrize("delayed", [False, True])


@DELAYED
@LAYERS
@pytest.mark.parametrize("first", [False, True])
def test_a_layer_backward_that_failed_before_its_gemm_can_be_repeated(
    first, kind, packed, delayed, make_layer, assert_close
):
    """The last weight's main_grad is wrong: those before it were already decided upon."""
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue() if delayed else None
    before = layer.attach(False)
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue, is_first_microbatch=first)
    state, param = outside(layer), layer.params[0]
    right, param.main_grad = param.main_grad, torch.zeros(3)
    with pytest.raises(ValueError, match="expected main_grad of shape"):
        y.backward(dy)
    param.main_grad = right
    assert outside(layer) == state
    assert not queue
    y.backward(dy)
    layer.backward(2, wgrad_queue=queue)
    if queue:
        queue.run()
    before = [torch.zeros_like(b) for b in before] if first else before
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))
