"""State that one failed call leaves behind: see docs/errors_in_backward.md."""

import contextlib

import pytest
import torch
from support.contract_helpers import plus
from support.contract_model import Boom

import fusedmlp
from fusedmlp.contract.destinations import main_grad
from fusedmlp.operators import ops

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False)]
)


@contextlib.contextmanager
def failing(owner, name, *, after=False, skip=0):
    """Make the call of `owner.name` after `skip` others raise, before or after its effect; later calls work."""
    real, skipped = getattr(owner, name), 0

    def fails(*args, **options):
        nonlocal skipped
        if skipped < skip:
            skipped += 1
            return real(*args, **options)
        setattr(owner, name, real)
        if after:
            real(*args, **options)
        raise Boom

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, real)


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
    """The error of its run is kept, and with it every frame of the traceback."""
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    layer.attach(False)
    layer.backward(1, wgrad_queue=queue, overwrites=True)
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
FIRST = pytest.mark.parametrize("first", [False, True])


@DELAYED
@FIRST
@LAYERS
def test_a_layer_backward_that_failed_before_its_gemm_can_be_repeated(
    first, kind, packed, delayed, make_layer, assert_close
):
    """The first weight's main_grad is wrong, which is found after the last weight's route was decided."""
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue() if delayed else None
    before = layer.attach(False)
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue)
    for each in layer.params if first else []:
        each.overwrite_main_grad = True
    param = layer.params[0]
    right, param.main_grad = param.main_grad, torch.zeros(3)
    with pytest.raises(ValueError, match="expected main_grad of shape"):
        y.backward(dy)
    param.main_grad = right
    assert not queue
    y.backward(dy)
    for each in layer.params if first else []:
        each.overwrite_main_grad = False
    layer.backward(2, wgrad_queue=queue)
    if queue:
        queue.run()
    before = [torch.zeros_like(b) for b in before] if first else before
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))


@pytest.mark.parametrize("place", ["dummy", "gemm", "put", "second put"])
@pytest.mark.parametrize("after", [False, True])
@FIRST
def test_of_a_layer_backward_that_failed_nothing_remains_in_the_next_step(
    first, after, place, make_layer, assert_close
):
    """`clear()` and zeroing discard the step. Where the next gradient overwrites, zeroing is not needed."""
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    layer.attach(False)
    owner, name = {"dummy": (main_grad, "set_dummy_wgrad"), "gemm": (ops, "grouped_mlp_backward_")}.get(
        place, (fusedmlp.WgradQueue, "put")
    )
    with failing(owner, name, after=after, skip=int(place == "second put")), pytest.raises(Boom):
        layer.backward(1, wgrad_queue=queue, overwrites=first)
    queue.clear()
    for param in layer.params if not first else []:
        param.main_grad.zero_()
    layer.backward(2, overwrites=first)  # no queued overwrite is in the way
    layer.backward(3, wgrad_queue=queue)
    queue.run()
    assert_close(layer.main_grads(), layer.wgrads(2, 3))


@pytest.mark.parametrize("after", [False, True])
def test_what_a_failed_gemm_wrote_stays_unless_the_next_gradient_overwrites(after, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    with failing(ops, "grouped_mlp_backward_", after=after), pytest.raises(Boom):
        layer.backward(1)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1)) if after else before)
    with failing(ops, "grouped_mlp_backward_", after=after), pytest.raises(Boom):
        layer.backward(2, overwrites=True)
    layer.backward(3, overwrites=True)
    layer.backward(4)
    assert_close(layer.main_grads(), layer.wgrads(3, 4))


@pytest.mark.parametrize("handed_over", [False, True])
def test_an_owner_that_overwrites_still_does_after_a_failure(handed_over, make_layer, assert_close):
    """`overwrite_main_grad`: a gradient that failed does not count as the one that overwrites in a backward."""
    layer = make_layer()
    layer.attach(None if not handed_over else False)
    for param in layer.params:
        param.overwrite_main_grad = True
        param.main_grad.fill_(float("nan"))
    other, (x, dy) = make_layer(), layer.batch(1)

    @torch.enable_grad()
    def twice(_):  # both inside one backward; the user catches the failure
        with failing(ops, "grouped_mlp_backward_"), pytest.raises(Boom):
            layer.backward(1)
        layer.backward(2)

    start = other(x.requires_grad_())
    start.register_hook(twice)
    start.backward(dy)
    assert_close(layer.main_grads(), layer.wgrads(2))


def test_a_backward_inside_another_keeps_what_the_outer_one_will_take_back(make_layer, assert_close):
    layer, other = make_layer(), make_layer()
    for each in (layer, other):
        buffer = fusedmlp.MainGradBuffer(each.params)
        buffer.flat.fill_(torch.nan)
        buffer.zero_grad()
    real, (x, dy) = ops.grouped_mlp_backward_, other.batch(1)
    y = other(x)

    def nested(*_):
        ops.grouped_mlp_backward_ = real
        y.backward(dy)
        raise Boom

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "grouped_mlp_backward_", nested)
        with pytest.raises(Boom):
            layer.backward(1)
    layer.backward(2)
    other.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))
    assert_close(other.main_grads(), other.wgrads(1, 2))


# A forward that failed, or ran under no_grad


def test_zero_starts_a_step_in_which_everything_adds(make_layer, assert_close):
    layer = make_layer()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    x, _ = layer.batch(1)
    layer(x)
    with torch.no_grad():
        layer(x)
    buffer.zero_grad()
    queue = fusedmlp.WgradQueue()
    layer.backward(1, wgrad_queue=queue)
    layer.backward(2)  # refused, if the queue were going to overwrite
    queue.run()
    assert_close(layer.main_grads(), layer.wgrads(1, 2))
