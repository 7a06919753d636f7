"""Backwards that are nested, interleaved or failed: each counts as one, begins once and leaves nothing behind."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.contract import engine
from fusedmlp.operators import ops

pytestmark = [
    pytest.mark.usefixtures("nan_in_empty"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


@pytest.fixture(autouse=True)
def none_running(monkeypatch):
    """Begin without running backwards, also after tests that interrupted the end of one."""
    monkeypatch.setattr(engine, "_running", {})


def owned(layer):
    """Give a layer main_grads of NaN, which every backward is to overwrite."""
    layer.attach(False)
    for param in layer.params:
        param.main_grad.fill_(float("nan"))
        param.overwrite_main_grad = True
    return layer


def nested(layer, x, depth):
    """Call the layer inside `depth` nested reentrant checkpoints."""
    if depth == 0:
        return layer(x)
    return checkpoint(nested, layer, x, depth - 1, use_reentrant=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "depths", [(65, 65), pytest.param((130, 130), marks=pytest.mark.exhaustive), (0, 65), (130, 0), (59, 61)], ids=str
)
def test_deeply_nested_backwards_overwrite_once(depths, packed, make_layer, assert_close):
    layer = owned(make_layer(packed=packed))
    for seeds in ((1, 2), (3, 4)):  # a second backward overwrites again
        outputs, dys = [], []
        for depth, (x, dy) in zip(depths, map(layer.batch, seeds), strict=True):
            outputs.append(nested(layer, x.requires_grad_(), depth))
            dys.append(dy)
        torch.autograd.backward(outputs, dys)
        assert_close(layer.main_grads(), layer.wgrads(*seeds))


@pytest.mark.sparse
@pytest.mark.parametrize("depth", [1, 59, 60, 61, 62, 63, 122])
@pytest.mark.parametrize("late", [False, True])
def test_a_plain_gradient_from_deep_inside_is_not_lost(late, depth, make_layer, assert_close):
    """No layer is in the checkpoints."""
    layer, one = make_layer(), torch.ones((), requires_grad=True)
    before, (x, dy) = layer.attach(False), layer.batch(1)

    def plain(scale):
        return sum(p.square().sum() for p in layer.params) * scale

    early = None if late else nested(plain, one, depth)
    y = layer(x)
    inside = nested(plain, one, depth) if late else early
    torch.autograd.backward([inside, y], [torch.ones(()), dy])
    expected = [b + g + 2 * p.detach() for b, g, p in zip(before, layer.wgrads(1), layer.params, strict=True)]
    assert_close(layer.main_grads(), expected)


@pytest.mark.parametrize("order", ["ffbb", "ffbfbb", "fffbbb", "ffbfbfbb"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_micro_batches_in_flight_each_overwrite(use_reentrant, delayed, order, make_layer, assert_close):
    """1F1B: later forwards run before an earlier backward."""
    layer, queue = owned(make_layer()), fusedmlp.WgradQueue() if delayed else None
    run, flying = partial(layer, wgrad_queue=queue), []
    if use_reentrant is not None:
        run = partial(checkpoint, run, use_reentrant=use_reentrant)
    forwards = backwards = 0
    for letter in order:
        if letter == "f":
            forwards += 1
            x, dy = layer.batch(forwards)
            flying.append((run(x.requires_grad_()), dy))
            continue
        backwards += 1
        y, dy = flying.pop(0)
        y.backward(dy)
        if queue is not None:
            queue.run()
        assert_close(layer.main_grads(), layer.wgrads(backwards))
        assert engine._running == {}


# Nothing is left of a backward


class Stop(Exception):
    pass


def loss(layer, hooks, depth):
    """A loss of a checkpointed layer; `hooks` are on x, in the inner and the outer backward."""
    x, dy = layer.batch(1)
    inner, outer = hooks

    def region(x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(inner)
        return layer(x)

    start = (x.requires_grad_() * 1).clone()
    start.register_hook(outer)
    y = nested(region, start, depth)
    return (y * dy).nansum()


def counting(seen, stops):
    def hook(_):
        seen.append(len(engine._running))
        if stops:
            raise Stop

    return hook


@pytest.mark.sparse
@pytest.mark.parametrize("depth", [0, 1, 3, 65])
@pytest.mark.parametrize("stops", [None, "inner", "outer", "gemm"])
@pytest.mark.parametrize("keeps_traceback", [False, True])
def test_nothing_is_left_of_a_backward(keeps_traceback, stops, depth, monkeypatch, make_layer, assert_close):
    layer, seen, kept = owned(make_layer()), [], []

    def fail(*_):
        seen.append(len(engine._running))
        raise Stop

    hooks = [counting(seen, stops == name) for name in ("inner", "outer")]
    assert engine._running == {}
    for _ in range(3):
        with monkeypatch.context() as patch:
            if stops == "gemm":
                patch.setattr(ops, "grouped_mlp_backward_", fail)
            try:
                loss(layer, hooks, depth).backward()
            except Stop as error:
                if keeps_traceback:
                    kept.append(error)
        assert seen
        assert set(seen) == {1}  # one backward, however deep
        assert engine._running == {}
        seen.clear()
    assert len(kept) == 3 * bool(keeps_traceback and stops)
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))
    assert engine._running == {}


def test_nothing_is_left_of_a_backward_inside_one_of_another_layer(make_layer, assert_close):
    """User code runs the inner backward. Both overwrite, as they share no weight."""
    layer, other, seen = owned(make_layer()), owned(make_layer()), []

    @torch.enable_grad()
    def run_other(_):
        other.backward(2)
        seen.append(len(engine._running))

    x, dy = layer.batch(1)
    x.requires_grad_().register_hook(run_other)
    layer(x).backward(dy)
    assert seen
    assert_close(layer.main_grads(), layer.wgrads(1))
    assert_close(other.main_grads(), other.wgrads(2))
    assert engine._running == {}
