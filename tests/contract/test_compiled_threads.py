"""Backwards of compiled graphs in several threads: what they add to one `main_grad` is right, or refused."""

import threading
import time
from functools import partial

import pytest
import torch
from support.compiler import in_graphs
from support.contract_helpers import in_threads

import fusedmlp
from fusedmlp.operators import torch_impl

pytestmark = [
    in_graphs,
    pytest.mark.sparse,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

LAYERS = pytest.mark.parametrize(("kind", "packed"), [("linear", True), ("mlp", False)])
THREADS, ROUNDS = 6, 8
ELSEWHERE = "a compiled backward in another thread is adding to this main_grad"


@pytest.fixture(params=[0.0, 0.02], ids=["as it comes", "slow GEMMs"])
def pause(request, monkeypatch):
    """Make every weight-gradient GEMM take `param` seconds longer, while other threads run."""

    def slow(real, *args):
        result = real(*args)
        time.sleep(request.param)
        return result

    for name in ("grouped_wgrad_", "grouped_mlp_backward_"):
        monkeypatch.setattr(torch_impl, name, partial(slow, getattr(torch_impl, name)))


@pytest.fixture
def compiled(make_layer):
    """A function that calls a layer in a graph of torch.compile."""
    torch._dynamo.reset()
    return torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")


def plus(before, wgrads, times=1):
    return [b + times * w for b, w in zip(before, wgrads, strict=True)]


def was_added(add, *args):
    """Run the call; False if it was refused."""
    try:
        add(*args)
    except RuntimeError as error:
        refusal = str(error)
    else:
        return True
    assert ELSEWHERE in refusal
    return False


def at_once(outputs, dy):
    """Run the backwards of all outputs together, each in a thread; return how many were not refused."""
    return sum(in_threads(*(partial(was_added, y.backward, dy) for y in outputs)))


@LAYERS
@pytest.mark.parametrize("attribute", [None, False])
@pytest.mark.parametrize("eager", [0, 3], ids=["compiled only", "compiled and eager"])
def test_no_sum_is_lost(eager, attribute, kind, packed, pause, compiled, make_layer, assert_close):
    """A refused backward has added nothing."""
    layer = make_layer(kind, packed)
    before, (x, dy) = layer.attach(attribute), layer.batch(1)
    compiled(layer, x).backward(dy)  # compiles forward and backward
    total = 1
    for _ in range(ROUNDS):
        outputs = [layer(x) if i < eager else compiled(layer, x) for i in range(THREADS)]
        succeeded = at_once(outputs, dy)
        assert succeeded >= 1
        total += succeeded
        assert_close(layer.main_grads(), plus(before, layer.wgrads(1), total))
    compiled(layer, x).backward(dy)  # nothing is refused afterwards
    layer.backward(1)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1), total + 2))


@pytest.mark.slow
@LAYERS
@pytest.mark.parametrize("how", ["buffer", "overwrite_main_grad"])
def test_one_of_them_overwrites(how, kind, packed, pause, compiled, make_layer, assert_close):
    layer, first = make_layer(kind, packed), how == "buffer"
    buffer = fusedmlp.MainGradBuffer(layer.params) if first else layer.attach(False)
    x, dy = layer.batch(1)
    compiled(layer, x).backward(dy)
    for param in layer.params:
        param.overwrite_main_grad = not first
    for _ in range(ROUNDS):
        outputs = [compiled(layer, x) for _ in range(THREADS)]
        for main in layer.main_grads():
            main.fill_(float("nan"))
        if first:
            buffer.zero_grad()
        succeeded = at_once(outputs, dy)
        assert succeeded >= 1
        times = succeeded if first else 1  # with overwrite_main_grad every backward overwrites
        assert_close(layer.main_grads(), plus([0] * len(layer.params), layer.wgrads(1), times))


@pytest.mark.slow
@LAYERS
def test_graphs_that_share_nothing_run_at_once(kind, packed, pause, compiled, make_layer, assert_close):
    layers = [make_layer(kind, packed) for _ in range(THREADS)]
    befores, (x, dy) = [layer.attach(False) for layer in layers], layers[0].batch(1)
    for layer in layers:
        compiled(layer, x).backward(dy)
    for _ in range(ROUNDS):
        assert at_once([compiled(layer, x) for layer in layers], dy) == THREADS
    for layer, before in zip(layers, befores, strict=True):
        assert_close(layer.main_grads(), plus(before, layer.wgrads(1), 1 + ROUNDS))


class Paused:
    """A compiled backward in another thread, stopped at the end of its weight-gradient GEMM."""

    def __init__(self, y, dy, monkeypatch):
        self.inside, self.go = threading.Event(), threading.Event()
        self.thread, self.errors = threading.Thread(target=self.run, args=(y, dy)), []
        real = torch_impl.grouped_wgrad_

        def stop(*args):
            real(*args)
            if threading.current_thread() is self.thread:
                self.inside.set()
                self.go.wait(600)

        monkeypatch.setattr(torch_impl, "grouped_wgrad_", stop)

    def run(self, y, dy):
        try:
            y.backward(dy)
        except RuntimeError as error:
            self.errors.append(error)

    def __enter__(self):
        self.thread.start()
        assert self.inside.wait(600)

    def __exit__(self, *_):
        self.go.set()
        self.thread.join()
        assert self.errors == []


def add_in_eager(layer, dy, ready):
    layer.backward(2)


def add_in_graph(layer, dy, ready):
    ready.backward(dy)


def run_the_queue(layer, dy, ready):
    ready.run()


def add_plain_gradient(layer, dy, ready):
    sum((p * w).sum() for p, w in zip(layer.params, layer.wgrads(2), strict=True)).backward()


MEANWHILE = [
    add_in_eager,
    add_in_graph,
    run_the_queue,
    add_plain_gradient,
]


@pytest.mark.slow
@pytest.mark.parametrize("add", MEANWHILE, ids=lambda f: f.__name__)
def test_what_is_added_while_a_graph_adds_is_not_lost(add, monkeypatch, compiled, make_layer, assert_close):
    """The graph may work on a copy of main_grad: what else adds meanwhile must be kept or refused."""
    layer = make_layer("linear")
    before, (x, dy), (x2, dy2) = layer.attach(False), layer.batch(1), layer.batch(2)
    compiled(layer, x).backward(dy)
    ready = None
    if add is add_in_graph:
        ready = compiled(layer, x2)
    elif add is run_the_queue:
        ready = fusedmlp.WgradQueue()
        layer.backward(2, wgrad_queue=ready)
    with Paused(compiled(layer, x), dy, monkeypatch):
        added = was_added(add, layer, dy2, ready)
    if add is run_the_queue:
        ready.clear()
    seeds = (1, 1, 2) if added else (1, 1)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(*seeds)))
    assert not any(p.grad.any() for p in layer.params)
