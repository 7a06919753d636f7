"""Backwards that are nested, interleaved or failed: each counts as one, begins once and leaves nothing behind."""

from functools import partial
from itertools import count

import pytest
import torch
from support.contract_helpers import DELAYED, of_plain, one_backward, plain, plus, stale
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.contract import engine
from fusedmlp.operators import ops

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture(autouse=True)
def none_running(monkeypatch):
    """Begin without running backwards, also after tests that interrupted the end of one."""
    monkeypatch.setattr(engine, "_running", {})


def nested(layer, x, depth, use_reentrant=True):
    """Call the layer inside `depth` nested checkpoints."""
    if depth == 0:
        return layer(x)
    return checkpoint(nested, layer, x, depth - 1, use_reentrant, use_reentrant=use_reentrant)


SLOW = [((65, 65), []), ((130, 130), [pytest.mark.exhaustive]), ((0, 65), []), ((130, 0), []), ((59, 61), [])]


@pytest.mark.parametrize(
    ("depths", "use_reentrant"),
    [
        *(((depth, depth), use_reentrant) for depth in (1, 2) for use_reentrant in (False, True)),
        *(pytest.param(depths, True, marks=[pytest.mark.slow, *marks]) for depths, marks in SLOW),
    ],
    ids=str,
)
def test_nested_backwards_overwrite_once(depths, use_reentrant, make_layer, assert_close):
    layer = stale(make_layer(), overwrites=True)
    for seeds in ((1, 2), (3, 4)):  # a second backward overwrites again
        left = iter(depths)
        one_backward(layer, *seeds, call=lambda x, left=left: nested(layer, x, next(left), use_reentrant))
        assert_close(layer.main_grads(), layer.wgrads(*seeds))


@pytest.mark.sparse
@pytest.mark.parametrize("depth", [1, 59, 60, 61, 62, 63, 122])
@pytest.mark.parametrize("late", [False, True])
def test_a_plain_gradient_from_deep_inside_is_not_lost(late, depth, make_layer, assert_close):
    """No layer is in the checkpoints."""
    layer, one = make_layer(), torch.ones((), requires_grad=True)
    before, (x, dy) = layer.attach(False), layer.batch(1)

    y = layer(x) if late else None
    inside = nested(partial(plain, layer), one, depth)
    y = y if late else layer(x)
    torch.autograd.backward([inside, y, plain(layer)], [torch.ones(()), dy, torch.ones(())])
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1), of_plain(layer, 1, 1)))


@pytest.mark.parametrize("order", ["ffbb", "ffbfbb", "fffbbb", "ffbfbfbb"])
@DELAYED
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_micro_batches_in_flight_each_overwrite(use_reentrant, delayed, order, make_layer, assert_close):
    """1F1B: later forwards run before an earlier backward."""
    layer, queue = stale(make_layer(), overwrites=True), fusedmlp.WgradQueue() if delayed else None
    run, flying = partial(layer, wgrad_queue=queue), []
    if use_reentrant is not None:
        run = partial(checkpoint, run, use_reentrant=use_reentrant)
    seeds = count(1)
    for letter in order:
        if letter == "f":
            seed = next(seeds)
            x, dy = layer.batch(seed)
            flying.append((seed, run(x.requires_grad_()), dy))
            continue
        seed, y, dy = flying.pop(0)
        y.backward(dy)
        if queue is not None:
            queue.run()
        assert_close(layer.main_grads(), layer.wgrads(seed))
        assert engine._running == {}


# Nothing is left of a backward


class Stop(Exception):
    pass


@pytest.mark.sparse
@pytest.mark.parametrize("depth", [0, 1, 3, 65])
@pytest.mark.parametrize("stops", [None, "inner", "outer", "gemm"])
@pytest.mark.parametrize("keeps_traceback", [False, True])
def test_nothing_is_left_of_a_backward(keeps_traceback, stops, depth, monkeypatch, make_layer, assert_close):
    """Stops it at a hook on x, in the inner or the outer backward, or at the GEMM."""
    layer, seen, kept, gemm = stale(make_layer(), overwrites=True), [], [], ops.grouped_mlp_backward_
    x, dy = layer.batch(1)

    def at(name, *_):
        seen.append(len(engine._running))
        if stops == name:
            raise Stop

    def region(x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(partial(at, "inner"))
        return layer(x)

    assert engine._running == {}
    for _ in range(3):
        start = (x.detach().requires_grad_() * 1).clone()
        start.register_hook(partial(at, "outer"))
        loss = (nested(region, start, depth) * dy).nansum()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "grouped_mlp_backward_", lambda *args: at("gemm") or gemm(*args))
            try:
                loss.backward()
            except Stop as error:
                if keeps_traceback:
                    kept.append(error)
        assert set(seen) == {1}  # one backward, however deep
        assert engine._running == {}
        seen.clear()
    assert len(kept) == 3 * bool(keeps_traceback and stops)
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(2))
    assert engine._running == {}


def test_nothing_is_left_of_a_backward_inside_one_of_another_layer(make_layer, assert_close):
    """User code runs the inner backward. Both overwrite, as they share no weight."""
    layer, other, seen = stale(make_layer(), overwrites=True), stale(make_layer(), overwrites=True), []

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
