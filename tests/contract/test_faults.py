"""What a step that fails leaves behind: see docs/errors_in_backward.md."""

import contextlib

import pytest
import torch
from support.interrupts import interrupted
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp import main_grad, ops

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False)]
)


class Boom(Exception):
    """What every fault here raises."""


@contextlib.contextmanager
def failing(owner, name, *, after=False, skip=0):
    """Inside, the next call of `owner.name`, or one after it, raises before or after its effect; later ones work."""
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
FIRST = pytest.mark.parametrize("first", [False, True])


@DELAYED
@FIRST
@LAYERS
def test_a_layer_backward_that_failed_before_its_gemm_can_be_repeated(
    first, kind, packed, delayed, make_layer, assert_close
):
    """The first weight's main_grad is wrong: the last one's was already decided upon."""
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


@pytest.mark.parametrize("place", ["dummy", "gemm", "put", "second put", "after the puts"])
@pytest.mark.parametrize("after", [False, True])
@FIRST
def test_a_layer_backward_that_failed_is_not_in_the_queue(first, after, place, make_layer, assert_close):
    """Repeated, it is queued once; nothing else of it remains either."""
    layer, queue = make_layer(), fusedmlp.WgradQueue()
    before = layer.attach(False)
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue, is_first_microbatch=first)
    state = outside(layer)
    with contextlib.ExitStack() as faults:
        if place == "dummy":
            faults.enter_context(failing(main_grad, "put_dummy", after=after))
        elif place == "gemm":
            faults.enter_context(failing(ops, "grouped_mlp_backward_", after=after))
        elif place == "after the puts":
            faults.enter_context(failing(torch.Tensor, "to", after=after))
        else:
            faults.enter_context(failing(fusedmlp.WgradQueue, "put", after=after, skip=int(place == "second put")))
        faults.enter_context(pytest.raises(Boom))
        y.backward(dy)
    assert outside(layer) == state
    assert len(queue) == 0
    layer.backward(2)  # no queued overwrite is in the way
    y.backward(dy)
    queue.run()
    before = [torch.zeros_like(b) for b in before] if first else before
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))


@pytest.mark.parametrize("after", [False, True])
def test_what_a_failed_gemm_wrote_stays_unless_the_next_gradient_overwrites(after, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    state = outside(layer)
    with failing(ops, "grouped_mlp_backward_", after=after), pytest.raises(Boom):
        layer.backward(1)
    assert outside(layer) == state
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1)) if after else before)
    with failing(ops, "grouped_mlp_backward_", after=after), pytest.raises(Boom):
        layer.backward(2, is_first_microbatch=True)
    layer.backward(3)
    layer.backward(4)
    assert_close(layer.main_grads(), layer.wgrads(3, 4))


@pytest.mark.parametrize("handed_over", [False, True])
def test_an_owner_that_overwrites_still_does_after_a_failure(handed_over, make_layer, assert_close):
    """`overwrite_main_grad`: each backward overwrites, and so does a new main_grad within one."""
    layer = make_layer()
    layer.attach(None if not handed_over else False)
    for param in layer.params:
        param.overwrite_main_grad = True
        param.main_grad.fill_(float("nan"))
    other, (x, dy) = make_layer(), layer.batch(1)

    @torch.enable_grad()
    def twice(_):  # in one backward, of which the user catches the failure
        with failing(ops, "grouped_mlp_backward_"), pytest.raises(Boom):
            layer.backward(1)
        layer.backward(2)

    start = other(x.requires_grad_())
    start.register_hook(twice)
    start.backward(dy)
    assert_close(layer.main_grads(), layer.wgrads(2))


def test_a_backward_inside_another_keeps_what_the_outer_one_will_take_back(make_layer, assert_close):
    layer, other = make_layer(), make_layer()
    layer.attach(False)
    other.attach(False)
    real, (x, dy) = ops.grouped_mlp_backward_, other.batch(1)
    y = other(x, is_first_microbatch=True)

    def nested(*_):
        ops.grouped_mlp_backward_ = real
        y.backward(dy)
        raise Boom

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "grouped_mlp_backward_", nested)
        with pytest.raises(Boom):
            layer.backward(1, is_first_microbatch=True)
    layer.backward(2)
    other.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))
    assert_close(other.main_grads(), other.wgrads(1, 2))


# A forward that failed, or was no training


@pytest.mark.parametrize("place", ["expert_offsets", "grouped_mlp", "counts"])
def test_a_forward_that_failed_overwrites_nothing(place, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    x, _ = layer.batch(1)
    fault = failing(ops, place) if place != "counts" else contextlib.nullcontext()
    with fault, pytest.raises((Boom, ValueError)):
        layer(x if place != "counts" else x[:2], is_first_microbatch=True)
    layer.backward(2)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(2)))


def test_an_evaluation_does_not_let_an_old_graph_overwrite(make_layer):
    """Only a checkpoint's second forward is the first micro-batch that a forward under no_grad spoke of."""
    layer = make_layer()
    layer.attach(False)
    x, dy = layer.batch(1)
    y = layer(x, is_first_microbatch=True)
    y.backward(dy, retain_graph=True)
    held = [m.clone() for m in layer.main_grads()]
    with torch.no_grad():
        layer(x, is_first_microbatch=True)
    with pytest.raises(RuntimeError, match=r"a forward under torch.no_grad\(\) had is_first_microbatch=True"):
        y.backward(dy)
    assert all(torch.equal(m, h) for m, h in zip(layer.main_grads(), held, strict=True))


def test_zero_starts_a_step_in_which_everything_adds(make_layer, assert_close):
    layer = make_layer()
    buffer = fusedmlp.MainGradBuffer(layer.params)
    x, _ = layer.batch(1)
    layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer(x, is_first_microbatch=True)
    buffer.zero_()
    queue = fusedmlp.WgradQueue()
    layer.backward(1, wgrad_queue=queue)
    layer.backward(2)  # refused, if the queue were going to overwrite
    queue.run()
    assert_close(layer.main_grads(), layer.wgrads(1, 2))


@pytest.mark.parametrize("place", ["lending", "inside"])
def test_as_grad_that_failed_lends_nothing(place, make_layer, assert_close):
    layer = make_layer(dtype=torch.bfloat16)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    layer.backward(1)
    fault = failing(torch.Tensor, "to", skip=1) if place == "lending" else contextlib.nullcontext()
    with fault, pytest.raises(Boom), buffer.as_grad():
        raise Boom
    assert layer.grads() == [None, None]
    assert_close(layer.main_grads(), layer.wgrads(1), dtype=torch.bfloat16)
    buffer.zero_()


# A step that failed anywhere


class Failing(torch.autograd.Function):
    """The user's own, whose forward or backward raises where `fault` says so."""

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

    def call(self, layer, x):
        def hooks(tensor, place):
            self.fault(place)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda t: hooks(t, "pack"), lambda t: hooks(t, "unpack")):
            y = layer(x, COUNTS, **self.first)
        if y.requires_grad:
            y.register_hook(lambda _: self.fault("tensor hook"))
            node = y.grad_fn.next_functions[0][0]  # of the layer: y's own is that of the module's backward hook
            node.register_prehook(lambda _: self.fault("node pre-hook"))
            node.register_hook(lambda *_: self.fault("node hook"))
        self.fault("after the layer")
        return y

    def forward(self, x, first, reentrant):
        self.first = {"is_first_microbatch": first}
        for layer in self.layers:
            x = Failing.apply(x, self.fault)
            x = self.call(layer, x) if reentrant is None else checkpoint(self.call, layer, x, use_reentrant=reentrant)
        return x


COUNTS = (3, 0, 2)


class Fault:
    """Raises when it is called for the n-th time; notes the places."""

    def __init__(self):
        self.places, self.at = [], None

    def __call__(self, place):
        self.places.append(place)
        if len(self.places) - 1 == self.at:
            raise Boom


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@DELAYED
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("owner", ["zeroes", "overwrites"])
def test_a_step_that_failed_anywhere_is_discarded_and_done_again(owner, reentrant, delayed, assert_close):
    """Every hook and every piece of user code raises in turn. Each layer's gradient is there wholly or not at all."""
    fault = Fault()
    model = Model(fault, delay_wgrad=delayed)
    buffer = fusedmlp.MainGradBuffer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, sum(COUNTS), 4, generator=generator) for _ in range(2)]

    def step(at=None):
        for microbatch, (x, dy) in enumerate(batches):
            fault.places, fault.at = [], at if microbatch == 1 else None
            model(x.clone().requires_grad_(), owner == "overwrites" and microbatch == 0, reentrant).backward(dy)

    def discard():
        for layer in model.layers if delayed else []:
            layer.wgrad_queue.clear()
        if owner == "zeroes":
            buffer.zero_()

    def finish():
        for layer in model.layers:
            layer.backward_dw()
        return [param.main_grad.clone() for param in buffer.params]

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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in __del__
@pytest.mark.parametrize(
    ("owner", "delayed"), [("zeroes", True), ("overwrites", False), ("overwrites each backward", True)]
)
def test_an_interrupt_at_any_line_does_no_harm_to_the_next_step(owner, delayed, make_layer, assert_close):
    """Also while its traceback is kept, and with it every local variable."""
    layers = [make_layer(), make_layer()]  # of which the second one is never interrupted
    queue = fusedmlp.WgradQueue() if delayed else None
    for layer in layers:
        layer.attach(False)
        for param in layer.params:
            param.overwrite_main_grad = owner == "overwrites each backward"

    def step(layer):
        layer.backward(wgrad_queue=queue, is_first_microbatch=owner == "overwrites")
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
        flags = {(p.grad_added_to_main_grad, p.grad is not None) for p in layers[0].params}
        assert flags in ({(False, False)}, {(True, True)}), kept[-1]
        assert not queue or len(queue) in (1, 2)
        for layer in reversed(layers):
            discard(layer)
            step(layer)
            assert_close(layer.main_grads(), wgrads)
        discard(layers[0])
        line += 1
    assert len(kept) > 100
