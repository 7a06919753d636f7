"""Backwards of compiled graphs in several threads: what they add to one `main_grad` is right, or refused."""

import threading
import time
from functools import partial

import pytest
import torch
from support.compiler import DYNAMO_WARNS, in_graphs
from support.contract_helpers import in_threads, plus

import fusedmlp
from fusedmlp.operators import torch_impl

pytestmark = [in_graphs, pytest.mark.sparse, *DYNAMO_WARNS]

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
@pytest.mark.parametrize(
    ("owner", "eager"),
    [
        *((owner, eager) for owner in ("adds", "adds, flag") for eager in (0, 3)),
        ("buffer", 3),
        *(pytest.param(owner, 0, marks=pytest.mark.slow) for owner in ("buffer", "overwrite_main_grad")),
    ],
)
def test_no_sum_is_lost(owner, eager, kind, packed, pause, compiled, make_layer, assert_close):
    """Of six backwards, `eager` run outside of graphs; a refused one has added nothing."""
    layer = make_layer(kind, packed)
    buffer = fusedmlp.MainGradBuffer(layer.params) if owner == "buffer" else None
    before = layer.attach(None if owner == "adds" else False) if buffer is None else [0] * len(layer.params)
    x, dy = layer.batch(1)
    compiled(layer, x).backward(dy)  # compiles forward and backward
    total = 1
    for param in layer.params:
        param.overwrite_main_grad = owner == "overwrite_main_grad"
    for _ in range(ROUNDS):
        outputs = [layer(x) if i < eager else compiled(layer, x) for i in range(THREADS)]
        if "adds" not in owner:
            before, total = [0] * len(layer.params), 0
            for main in layer.main_grads():
                main.fill_(float("nan"))
        if buffer is not None:
            buffer.zero_grad()
        succeeded = at_once(outputs, dy)
        assert succeeded >= 1
        total += 1 if owner == "overwrite_main_grad" else succeeded  # there, every backward overwrites
        assert_close(layer.main_grads(), plus(before, layer.wgrads(*[1] * total)))
    for param in layer.params:
        param.overwrite_main_grad = False
    compiled(layer, x).backward(dy)  # nothing is refused afterwards
    layer.backward(1)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(*[1] * (total + 2))))


@LAYERS
def test_no_plain_gradient_in_a_buffer_is_lost(kind, packed, pause, compiled, make_layer, assert_close):
    """Three backwards of a graph, three of plain PyTorch through one weight."""
    layer = make_layer(kind, packed)
    buffer, (weight, *_), wgrads = fusedmlp.MainGradBuffer(layer.params), layer.params, layer.wgrads()
    x, dy = layer.batch(1)
    compiled(layer, x).backward(dy)  # compiles forward and backward
    for _ in range(ROUNDS):
        buffer.zero_grad()
        fused = [partial(compiled(layer, x).backward, dy) for _ in range(3)]
        plain = [weight.square().sum().backward for _ in range(3)]
        added = in_threads(*(partial(was_added, run) for run in fused + plain))
        assert any(added)
        assert_close([weight.grad], [sum(added[:3]) * wgrads[0] + 2 * sum(added[3:]) * weight.detach().double()])


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
        assert_close(layer.main_grads(), plus(before, layer.wgrads(*[1] * (1 + ROUNDS))))


MEANWHILE = {
    "in eager mode": lambda layer, dy, y, queue: layer.backward(2),
    "in a graph": lambda layer, dy, y, queue: y.backward(dy),
    "from a queue": lambda layer, dy, y, queue: queue.run(),
    "from plain PyTorch": lambda layer, dy, y, queue: sum(
        (p * w).sum() for p, w in zip(layer.params, layer.wgrads(2), strict=True)
    ).backward(),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", MEANWHILE)
def test_what_is_added_while_a_graph_adds_is_not_lost(how, monkeypatch, compiled, make_layer, assert_close):
    """The graph may work on a copy of main_grad: what else adds meanwhile must be kept or refused."""
    layer, queue = make_layer("linear"), fusedmlp.WgradQueue()
    before, (x, dy), (x2, dy2) = layer.attach(False), layer.batch(1), layer.batch(2)
    compiled(layer, x).backward(dy)
    y = compiled(layer, x2)
    if how == "from a queue":
        layer.backward(2, wgrad_queue=queue)
    inside, go, real = threading.Event(), threading.Event(), torch_impl.grouped_wgrad_

    def stop(*args):
        real(*args)
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go.wait(600)

    monkeypatch.setattr(torch_impl, "grouped_wgrad_", stop)
    thread = threading.Thread(target=compiled(layer, x).backward, args=(dy,))
    thread.start()
    assert inside.wait(600)
    try:
        added = was_added(MEANWHILE[how], layer, dy2, y, queue)
    finally:
        go.set()
    thread.join()
    queue.clear()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(*(1, 1, 2)[: 2 + added])))
    assert not any(p.grad.any() for p in layer.params)
