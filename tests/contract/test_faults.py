"""A step that fails, at every place and every line, and the step after it: see docs/errors_in_backward.md."""

import contextlib
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from contract.contract_world import UserCode
from support.contract_helpers import DELAYED, FUSE, PACKED, failing, in_threads, plus, stale_buffer, unchanged
from support.contract_model import Boom
from support.grids import is_quick
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp import autograd, contract, functional
from fusedmlp.contract.parameter_state import accumulation_lock
from fusedmlp.operators import ops

COUNTS = (3, 0, 2)
FIRST = pytest.mark.parametrize("first", [False, True])
AFTER = pytest.mark.parametrize("after", [False, True])


@AFTER
@FIRST
@FUSE
@pytest.mark.parametrize("run", ["run", "run_oldest"])
def test_a_queue_whose_gemm_failed_never_adds_it_again(run, fuse, first, after, make_layer, assert_close):
    """Nor does it overwrite anything once it is cleared, although the error is kept, with every frame's variables."""
    layer, queue = make_layer(), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach(False)
    layer.backward(1, wgrad_queue=queue, overwrites=first)
    with failing(ops, "grouped_wgrad_", after=after), pytest.raises(Boom) as kept:
        queue.run()
    held = [m.clone() for m in layer.main_grads()]
    with pytest.raises(RuntimeError, match=r"fc2_weight: .*may hold part of that gradient.*queue.clear\(\)"):
        getattr(queue, run)()
    assert unchanged(layer.main_grads(), held)
    assert len(queue) == 2
    queue.clear()
    assert len(queue) == 0
    for param, main in zip(layer.params, before, strict=True):
        param.main_grad.copy_(main)
    layer.backward(2)
    layer.backward(3, wgrad_queue=queue)
    getattr(queue, run)()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(2, 3)))
    assert kept.value


# The backward of one layer


@DELAYED
@FIRST
@PACKED
def test_a_layer_backward_that_failed_before_its_gemm_can_be_repeated(packed, first, delayed, make_layer, assert_close):
    """The first weight's main_grad is wrong, which is found after the last weight's route was decided."""
    layer, queue = make_layer("mlp", packed), fusedmlp.WgradQueue()
    before, (x, dy) = layer.attach(False), layer.batch(1)
    options = {"wgrad_queue": queue if delayed else None}
    y = layer(x, **options)
    param = layer.params[0]
    right, param.main_grad = param.main_grad, torch.zeros(3)
    with layer.overwriting() if first else contextlib.nullcontext():
        with pytest.raises(ValueError, match="expected main_grad of shape"):
            y.backward(dy)
        param.main_grad = right
        assert not queue
        y.backward(dy)
    layer.backward(2, **options)
    queue.run()
    assert_close(layer.main_grads(), plus([b * (not first) for b in before], layer.wgrads(1, 2)))


@pytest.mark.parametrize("attribute", [None, False])
def test_a_gradient_that_failed_is_not_the_one_that_overwrites_in_a_backward(attribute, make_layer, assert_close):
    layer, other = make_layer(), make_layer()
    layer.attach(attribute)
    for param in layer.params:
        param.overwrite_main_grad = True
        param.main_grad.fill_(float("nan"))

    @torch.enable_grad()
    def twice(_):  # both inside one backward; the user catches the failure
        with failing(ops, "grouped_mlp_backward_"), pytest.raises(Boom):
            layer.backward(1)
        layer.backward(2)

    x, dy = layer.batch(1)
    y = other(x.requires_grad_())
    y.register_hook(twice)
    y.backward(dy)
    assert_close(layer.main_grads(), layer.wgrads(2))


def test_a_backward_inside_one_that_fails_is_not_taken_back(make_layer, assert_close):
    layer, other = make_layer(), make_layer()
    _kept = [stale_buffer(each.params) for each in (layer, other)]
    x, dy = other.batch(1)
    y = other(x)
    with failing(ops, "grouped_mlp_backward_", inside=lambda: y.backward(dy)), pytest.raises(Boom):
        layer.backward(1)
    layer.backward(2)
    other.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))
    assert_close(other.main_grads(), other.wgrads(1, 2))


# A step of two layers, at every place


class Fault:
    """Records the places of its calls; raises in call number `at`, from 0."""

    def __init__(self):
        self.places, self.at = [], None

    def __call__(self, place):
        self.places.append(place)
        if len(self.places) - 1 == self.at:
            raise Boom

    def passing(self, place, tensor):
        self(place)
        return tensor


def forward(layers, x, fault, reentrant, **options):
    """Run fused layers with user code before each; `fault(place)` is called at every place, in backward too."""

    def call(layer, x):
        hooks = partial(fault.passing, "pack"), partial(fault.passing, "unpack")
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = fusedmlp.grouped_mlp(x, *layer, COUNTS, **options)
        if y.requires_grad:
            y.register_hook(lambda _: fault("tensor hook"))
            y.grad_fn.register_prehook(lambda _: fault("node pre-hook"))
            y.grad_fn.register_hook(lambda *_: fault("node hook"))
        fault("after the layer")
        return y

    for layer in layers:
        fault("user's forward")
        x, run = UserCode.apply(x, partial(fault, "user's backward")), partial(call, layer)
        x = run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)
    return x


@pytest.mark.sparse
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(("owner", "delayed"), [("buffer", True), ("overwrites", False)])
def test_a_step_that_failed_anywhere_is_discarded_and_done_again(owner, reentrant, delayed, make_layer, assert_close):
    """Every hook and every piece of user code raises in turn. Each layer's gradient is complete or absent."""
    fault, queue = Fault(), fusedmlp.WgradQueue() if delayed else None
    layers = [make_layer().params for _ in range(2)]
    params, buffer = [param for layer in layers for param in layer], None
    for param in params[::2]:
        param.register_post_accumulate_grad_hook(lambda _: fault("post-accumulate hook"))
        param.skip_backward_post_hook = True  # the hook takes no gradient
    if owner == "buffer":
        buffer = fusedmlp.MainGradBuffer(params)
    for param in params if owner == "overwrites" else []:
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param, requires_grad=False), False
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, sum(COUNTS), 4, generator=generator) for _ in range(2)]

    def step(at=None):
        for microbatch, (x, dy) in enumerate(batches):
            fault.places, fault.at = [], at if microbatch == 1 else None
            for param in params if owner == "overwrites" else []:
                param.overwrite_main_grad = microbatch == 0
            forward(layers, x.clone().requires_grad_(), fault, reentrant, wgrad_queue=queue).backward(dy)

    def finish():
        if queue is not None:
            queue.run()
        return [param.main_grad.clone() for param in params]

    def discard():
        if queue is not None:
            queue.clear()
        if buffer is not None:
            buffer.zero_grad()

    def differ(a, b):
        return all((p - q).abs().max() > 1e-3 for p, q in zip(a, b, strict=True))

    with pytest.raises(Boom):
        step(at=0)
    first = finish()
    discard()
    step()
    places, right = fault.places, finish()
    assert {"unpack", "user's backward", "node hook", "tensor hook", "post-accumulate hook"} < set(places)
    discard()
    for at in range(len(places)):
        with pytest.raises(Boom):
            step(at)
        landed = finish()
        for both in (slice(0, 2), slice(2, 4)):
            assert_close(landed[both], right[both] if differ(landed[both], first[both]) else first[both])
        discard()
        step()
        assert_close(finish(), right)
        discard()


# A step of a layer, at every line


def other_threads_can_run():
    def take_the_lock():
        if taken := accumulation_lock.acquire(timeout=60):
            accumulation_lock.release()
        return taken

    return in_threads(take_the_lock) == [True]


def files(module):
    """The file of a module, or the files of a package."""
    path = Path(module.__file__)
    return path.parent.rglob("*.py") if path.name == "__init__.py" else [path]


FILES = {str(path) for module in (autograd, functional, contract) for path in files(module)}  # they handle gradients


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


def interrupted(call, line, kept):
    """Run `call`, and raise at the line of FILES that is executed as number `line`, from 0; return whether one was.

    The exception goes to the list `kept`, unless Python swallows it (in `__del__`).
    """
    executed = 0

    def trace(frame, event, _):
        nonlocal executed
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            executed += 1
            if executed > line:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted as error:
        kept.append(error)
    finally:
        sys.settrace(before)
    return executed > line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in __del__
@pytest.mark.parametrize(
    ("owner", "delayed"), [("zeroes", True), ("overwrites", False), ("overwrites each backward", True)]
)
def test_an_interrupt_at_any_line_does_no_harm_to_the_next_step(owner, delayed, make_layer, assert_close):
    """Tracebacks are kept, and with them every local variable."""
    layers = [make_layer(), make_layer()]  # the second one is never interrupted
    queue = fusedmlp.WgradQueue()
    for layer in layers:
        layer.attach(False)
        for param in layer.params:
            param.overwrite_main_grad = owner == "overwrites each backward"

    def step(layer):
        layer.backward(wgrad_queue=queue if delayed else None, overwrites=owner == "overwrites")
        if queue:
            queue.run()

    def discard(layer):
        for param in layer.params:
            param.grad, param.grad_added_to_main_grad = None, False
            if owner == "zeroes":
                param.main_grad.zero_()
        queue.clear()

    wgrads = layers[0].wgrads()
    kept, line = [], 0
    while interrupted(lambda: step(layers[0]), line, kept):
        assert len(queue) in (0, 1, 2)
        for layer in reversed(layers):
            discard(layer)
            step(layer)
            assert_close(layer.main_grads(), wgrads)
        discard(layers[0])
        assert other_threads_can_run(), kept[-1]
        line += 10 if is_quick() else 2
    assert len(kept) > (20 if is_quick() else 100)
