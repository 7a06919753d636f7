"""Every system of docs/systems.md in every mode: right, against float64 autograd, or refused, changing nothing."""

import pickle
import re
import threading
import time
from functools import partial

import pytest
import torch
from support import systems
from support.compiler import in_graphs
from support.contract_helpers import in_threads, plus
from support.systems import MODES, SYSTEMS, Step
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.contract.parameter_state import accumulation_lock
from fusedmlp.operators import ops

# A layer in a program of torch.export is in a graph.
RUN = [pytest.param(s, marks=[in_graphs] * ("torch.export" in s.name), id=s.name) for s in SYSTEMS if s.run is not None]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per expert"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("system", RUN)
def test_system(system, mode, packed, make_layer, assert_close):
    step = Step(make_layer, mode, packed)
    if mode in system.refused:
        places = step.places()
        with pytest.raises((RuntimeError, TypeError, ValueError), match=re.escape(system.refused[mode])):
            system.run(step)
        if not system.refused_late:
            assert all(torch.equal(p, b) for p, b in zip(places, step.before, strict=True))
        return
    handed = system.run(step)
    step.run_queue()
    expected, digits = step.layer.wgrads(*system.seeds), system.digits or step.layer.dtype
    if not system.seeds:
        expected = [torch.zeros_like(w) for w in expected]
    if handed is None:
        assert_close(step.places(), plus(step.before, expected), dtype=digits)
    else:
        assert_close(handed, expected)
        assert all(torch.equal(p, b) for p, b in zip(step.places(), step.before, strict=True))
    if step.memory == "buffer" and handed is None:
        assert all(p.grad is p.main_grad or p.grad.requires_grad for p in step.params)  # create_graph=True
    if step.memory == "owner":  # .grad holds nothing that could be added again
        assert not any(p.grad.count_nonzero() for p in step.params if p.grad is not None)


def test_the_document_holds_this_table():
    text = systems.PAGE.read_text()
    assert text == systems.page(text), "run: PYTHONPATH=.:tests python -m support.systems"
    assert text.count(" right |") > 50


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_two_threads_never_add_at_once(mode, make_layer, assert_close, monkeypatch):
    step, busy = Step(make_layer, mode, packed=True), threading.Lock()

    def alone(real, *args):
        assert busy.acquire(blocking=False), "a GEMM runs while another one does"
        time.sleep(0.2)
        busy.release()
        return real(*args)

    for name in ("grouped_wgrad_", "grouped_mlp_backward_"):
        monkeypatch.setattr(ops, name, partial(alone, getattr(ops, name)))

    def work(seed):
        x, dy = step.layer.batch(seed)
        queue = fusedmlp.WgradQueue() if step.queue is not None else None
        step.layer(x, accumulate_wgrad=step.accumulate, wgrad_queue=queue).backward(dy)
        if queue is not None:
            queue.run()

    in_threads(partial(work, 1), partial(work, 2))
    assert_close(step.places(), plus(step.before, step.layer.wgrads(1, 2)))


def test_what_unpickles_after_detach_or_from_a_state_dict_has_no_main_grad(tmp_path):
    module = fusedmlp.GroupedMLP(3, 4, 5, delay_wgrad=True)
    buffer = fusedmlp.MainGradBuffer(module.parameters())
    torch.save(module.state_dict(), tmp_path / "state")
    again = fusedmlp.GroupedMLP(3, 4, 5)
    again.load_state_dict(torch.load(tmp_path / "state"))
    assert torch.equal(again.fc1.weight, module.fc1.weight)
    buffer.detach()
    again = pickle.loads(pickle.dumps(module))
    assert not any(vars(p) for p in again.parameters())
    assert again.wgrad_queue is not module.wgrad_queue


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_compiled_autograd_really_compiles_and_uses_its_graph_again(make_layer, assert_close):
    """The same graph also serves `autograd.grad` afterwards, which writes to no main_grad."""
    step, graphs = Step(make_layer, "main_grad", packed=True), []

    def compiler(graph):
        graphs.append(graph)
        return graph

    with torch._dynamo.compiled_autograd._enable(compiler):
        for seed in (1, 2):
            x, dy = step.layer.batch(seed)
            (step(x) * dy).nan_to_num().sum().backward()
        compiled = len(graphs)
        (step.forward() * step.dy).nan_to_num().sum().backward()
        assert len(graphs) == compiled > 0
        x, dy = step.layer.batch(3)
        assert_close(torch.autograd.grad(step(x), step.params, dy), step.layer.wgrads(3))
    assert_close(step.places(), plus(step.before, step.layer.wgrads(1, 2, 1)))


def test_x_that_an_asynchronous_collective_still_computes(make_layer, assert_close):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    step = Step(make_layer, "main_grad", packed=True)
    with systems.one_rank() as mesh:
        with torch.no_grad():
            x = AsyncCollectiveTensor(
                torch.ops._c10d_functional.all_gather_into_tensor(step.x, 1, mesh.get_group().group_name)
            )
        assert isinstance(x, AsyncCollectiveTensor)
        step(x).backward(step.dy)
    assert_close(step.places(), plus(step.before, step.layer.wgrads()))


def test_a_plain_gradient_waits_for_other_threads(make_layer):
    """The thread of its backward adds it to main_grad, while another thread may run a GEMM."""
    layer = make_layer("linear")
    layer.attach(True)
    (param,), (x, dy) = layer.params, layer.batch(1)
    fused, locked = threading.Event(), threading.Event()
    plain = param.sum()
    plain.register_hook(lambda _: fused.set() or (locked.wait(600) and None))  # it comes last
    thread = threading.Thread(target=torch.autograd.backward, args=([plain, layer(x)], [torch.tensor(1.0), dy]))
    thread.start()
    assert fused.wait(600)
    with accumulation_lock:
        locked.set()
        before = param.main_grad.clone()
        thread.join(0.5)
        assert thread.is_alive()
        assert torch.equal(param.main_grad, before)
    thread.join()
    torch.testing.assert_close(param.main_grad, before + 1)


def test_checkpoints_of_two_threads_can_wait_for_each_other(make_layer):
    """Recomputation in a checkpoint, collectives included, runs while other threads compute gradients."""
    barrier = threading.Barrier(2)

    def work():
        layer = make_layer()

        def region(x):
            if torch._C._current_graph_task_id() != -1:  # recomputed
                barrier.wait(600)
            return layer(x)

        x, dy = layer.batch(1)
        checkpoint(region, x.requires_grad_(), use_reentrant=False).backward(dy)

    in_threads(work, work)
    assert not barrier.broken
