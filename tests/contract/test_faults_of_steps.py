"""A step that fails, at every place and every line, and the step after it: see docs/errors_in_backward.md."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from support.contract_model import Boom
from support.grids import is_quick
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp import autograd, contract, functional
from fusedmlp.contract.parameter_state import accumulation_lock

pytestmark = pytest.mark.usefixtures("nan_in_empty")

COUNTS = (3, 0, 2)


class Failing(torch.autograd.Function):
    """A user's function: its forward or backward raises where `fault` says so."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        fault("user's forward")
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        ctx.fault("user's backward")
        return dy * 2, None


class Model(torch.nn.Module):
    """Two fused layers with user code around and between; `fault(place)` is called at every place."""

    def __init__(self, fault, **options):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fault, self.options, self.queue = fault, options, None
        self.layers = torch.nn.ModuleList(fusedmlp.GroupedMLP(3, 4, 5, **options) for _ in range(2))
        for param in self.parameters():
            torch.nn.init.normal_(param, generator=generator)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: fault("forward pre-hook"))
            layer.register_forward_hook(lambda *_: fault("forward hook"))
            layer.register_full_backward_pre_hook(lambda *_: fault("backward pre-hook"))
            layer.register_full_backward_hook(lambda *_: fault("backward hook"))
            layer.fc1.weight.register_post_accumulate_grad_hook(lambda _: fault("post-accumulate hook"))
            layer.fc1.weight.skip_backward_post_hook = True  # the hook takes no gradient

    def call(self, layer, x):
        def hooks(tensor, place):
            self.fault(place)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda t: hooks(t, "pack"), lambda t: hooks(t, "unpack")):
            y = layer(x, COUNTS)
        if y.requires_grad:
            y.register_hook(lambda _: self.fault("tensor hook"))
            node = y.grad_fn.next_functions[0][0]  # the layer's: y.grad_fn belongs to the module's backward hook
            node.register_prehook(lambda _: self.fault("node pre-hook"))
            node.register_hook(lambda *_: self.fault("node hook"))
        self.fault("after the layer")
        return y

    def forward(self, x, reentrant):
        for layer in self.layers:
            x = Failing.apply(x, self.fault)
            x = self.call(layer, x) if reentrant is None else checkpoint(self.call, layer, x, use_reentrant=reentrant)
        return x


class Fault:
    """Records the places of its calls; raises in call number `at`, from 0."""

    def __init__(self):
        self.places, self.at = [], None

    def __call__(self, place):
        self.places.append(place)
        if len(self.places) - 1 == self.at:
            raise Boom


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.sparse
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(("owner", "delayed"), [("zeroes", True), ("overwrites", False)])
def test_a_step_that_failed_anywhere_is_discarded_and_done_again(owner, reentrant, delayed, assert_close):
    """Every hook and every piece of user code raises in turn. Each layer's gradient is complete or absent."""
    fault = Fault()
    model = Model(fault, delay_wgrad=delayed)
    if owner == "zeroes":
        buffer = fusedmlp.MainGradBuffer(model.parameters())
    for param in model.parameters() if owner == "overwrites" else []:  # a buffer would require zero_()
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, sum(COUNTS), 4, generator=generator) for _ in range(2)]

    def step(at=None):
        for microbatch, (x, dy) in enumerate(batches):
            fault.places, fault.at = [], at if microbatch == 1 else None
            for param in model.parameters() if owner == "overwrites" else []:
                param.overwrite_main_grad = microbatch == 0
            model(x.clone().requires_grad_(), reentrant).backward(dy)

    def discard():
        for layer in model.layers if delayed else []:
            layer.wgrad_queue.clear()
        if owner == "zeroes":
            buffer.zero_grad()

    def finish():
        for layer in model.layers:
            layer.backward_dw()
        return [param.main_grad.clone() for param in model.parameters()]

    def differ(a, b):
        return all((p - q).abs().max() > 1e-3 for p, q in zip(a, b, strict=True))

    with pytest.raises(Boom):
        step(at=0)
    first = finish()
    discard()
    step()
    places, right = fault.places, finish()
    assert {"unpack", "user's backward", "node hook", "backward hook", "post-accumulate hook"} < set(places)
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


def other_threads_can_run():
    free = []

    def work():
        if accumulation_lock.acquire(timeout=60):
            accumulation_lock.release()
            free.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return bool(free)


def _sources(module):
    """The file of a module, or the files of a package."""
    path = Path(module.__file__)
    return path.parent.rglob("*.py") if path.name == "__init__.py" else [path]


# Files that handle gradients.
FILES = {str(path) for module in (autograd, functional, contract) for path in _sources(module)}


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
    queue = fusedmlp.WgradQueue() if delayed else None
    for layer in layers:
        layer.attach(False)
        for param in layer.params:
            param.overwrite_main_grad = owner == "overwrites each backward"

    def step(layer):
        layer.backward(wgrad_queue=queue, overwrites=owner == "overwrites")
        if queue:
            queue.run()

    def discard(layer):
        for param in layer.params:
            param.grad, param.grad_added_to_main_grad = None, False
            if owner == "zeroes":
                param.main_grad.zero_()
        if queue is not None:
            queue.clear()

    wgrads = layers[0].wgrads()
    kept, line = [], 0
    while interrupted(lambda: step(layers[0]), line, kept):
        assert not queue or len(queue) in (1, 2)
        for layer in reversed(layers):
            discard(layer)
            step(layer)
            assert_close(layer.main_grads(), wgrads)
        discard(layers[0])
        assert other_threads_can_run(), kept[-1]
        line += 10 if is_quick() else 2
    assert len(kept) > (20 if is_quick() else 100)
