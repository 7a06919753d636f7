"""`"auto"` and `"grad"` with an existing `.grad`: the GEMM adds into it where it may; else the gradient is returned."""

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.contract_helpers import LAYERS
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.contract import engine
from fusedmlp.contract.destinations import destination
from fusedmlp.operators import ops

MODES = pytest.mark.parametrize("mode", ["auto", "grad"])


def start(layer, value=2.0):
    for param in layer.params:
        param.grad = torch.full_like(param, value)
    return [param.grad for param in layer.params]


def fused_step(layer, mode):
    """Run a micro-batch; return a queue, which is empty if the mode is not "delayed"."""
    queue, delayed = fusedmlp.WgradQueue(), mode == "delayed"
    layer.backward(accumulate_wgrad="auto" if delayed else mode, wgrad_queue=queue if delayed else None)
    return queue


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@LAYERS
@MODES
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_the_gemm_adds_into_an_existing_grad(
    layout, use_reentrant, mode, kind, packed, wgrad_gemms, make_layer, assert_close
):
    """Also where a checkpoint hands back other tensors than the weights."""
    layer = make_layer(kind, packed, layout=layout)
    x, dy = layer.batch(3)
    layer.backward(1, accumulate_wgrad=mode)
    assert not any(accumulate for *_, accumulate in wgrad_gemms.calls)
    wgrad_gemms.calls.clear()
    grads = layer.grads()
    layer.backward(2, accumulate_wgrad=mode)
    run = partial(layer, accumulate_wgrad=mode)
    y = run(x) if use_reentrant is None else checkpoint(run, x.requires_grad_(), use_reentrant=use_reentrant)
    y.backward(dy)
    assert all(accumulate for *_, accumulate in wgrad_gemms.calls)
    assert wgrad_gemms.pointers == 2 * [g.data_ptr() for g in grads]
    assert all(param.grad is grad for param, grad in zip(layer.params, grads, strict=True))
    assert_close(layer.grads(), layer.wgrads(1, 2, 3))


@LAYERS
@MODES
def test_tensor_hooks_get_the_gradient(mode, kind, packed, wgrad_gemms, make_layer, assert_close):
    """Hooks as of `wandb.watch`. The other weights, and the other experts of that weight, are added to in place."""
    layer, seen = make_layer(kind, packed), []
    grads, wgrads = start(layer), layer.wgrads()
    layer.params[-1].register_hook(lambda grad: seen.append(grad.clone()) or 3 * grad)
    layer.backward(accumulate_wgrad=mode)
    assert_close(seen, wgrads[-1:])
    assert_close(layer.grads(), [*(2 + w for w in wgrads[:-1]), 2 + 3 * wgrads[-1]])
    assert grads[-1].data_ptr() not in wgrad_gemms.pointers
    assert {g.data_ptr() for g in grads[:-1]} <= {*wgrad_gemms.pointers}


UNSUITABLE = {  # what .grad of the last weight becomes, whether weights are packed, and the message
    "sparse": (torch.Tensor.to_sparse, True, "dense; got one in torch.sparse_coo"),
    "requires grad": (torch.Tensor.requires_grad_, True, "requires_grad=False; got True"),
    "dtype": (torch.Tensor.double, True, "got torch.float64"),
    "strides unlike other experts'": (lambda grad: grad.mT.contiguous().mT, False, "strides of expert 0's"),
}


def make_unsuitable(layer, change):
    for param in layer.params:
        param.grad_dtype = None  # any dtype
    grads = start(layer)
    param = layer.params[-1]
    param.grad = change(grads.pop())
    return grads


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
@MODES
@pytest.mark.parametrize("what", UNSUITABLE)
def test_pytorch_adds_to_what_a_gemm_cannot_write(what, mode, wgrad_gemms, make_layer, assert_close):
    change, packed, _ = UNSUITABLE[what]
    layer = make_layer("mlp", packed)
    others = make_unsuitable(layer, change)
    layer.backward(accumulate_wgrad=mode)
    assert_close([g.detach().to_dense() for g in layer.grads()], [2 + w for w in layer.wgrads()], dtype=torch.float32)
    assert {g.data_ptr() for g in others} <= {*wgrad_gemms.pointers}


@pytest.mark.parametrize("what", UNSUITABLE)
def test_a_queue_refuses_what_a_gemm_cannot_write(what, make_layer):
    """A queue cannot return a gradient to autograd."""
    change, packed, message = UNSUITABLE[what]
    layer, queue = make_layer("mlp", packed), fusedmlp.WgradQueue()
    make_unsuitable(layer, change)

    def step():
        layer.backward(wgrad_queue=queue)
        queue.run()

    with pytest.raises(ValueError, match=message):
        step()
    assert all(torch.equal(g.detach().to_dense(), torch.full(g.shape, 2.0).to(g.dtype)) for g in layer.grads())
    queue.clear()


@MODES
def test_one_tensor_as_grad_of_two_experts(mode, wgrad_gemms, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    start(layer)
    layer.params[2].grad = layer.params[0].grad
    layer.backward(accumulate_wgrad=mode)
    first, second, third = layer.wgrads()
    assert_close(layer.grads(), [2 + first + third, 2 + second, 2 + first + third])
    assert len({*wgrad_gemms.pointers}) == len(wgrad_gemms.pointers) == 3  # two GEMMs on one tensor would race


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("mode", ["auto", "grad", "delayed"])
def test_an_expert_without_grad_beside_experts_with_one(mode, missing, wgrad_gemms, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    start(layer)
    layer.params[missing].grad = None
    fused_step(layer, mode).run()
    assert_close(layer.grads(), [w + 2 * (i != missing) for i, w in enumerate(layer.wgrads())])
    assert {p.grad.data_ptr() for i, p in enumerate(layer.params) if i != missing} <= {*wgrad_gemms.pointers}


# One weight, a layer in one thread and plain PyTorch in another


class Slow:
    """Make GEMMs read their outputs, wait for an event, write back what they read, and only then add."""

    def __init__(self, monkeypatch):
        self.began, self.wait_for = threading.Event(), threading.Event()
        self.waited = []
        gemm = ops.grouped_wgrad_

        def slowly(outs, *args):
            held = [out.clone() for out in outs]
            self.began.set()
            self.waited.append(self.wait_for.wait(0.3))
            for out, start in zip(outs, held, strict=True):
                out.copy_(start)  # erases what another thread added meanwhile
            return gemm(outs, *args)

        monkeypatch.setattr(ops, "grouped_wgrad_", slowly)


@pytest.mark.parametrize("mode", ["auto", "grad", "off", "delayed"])
@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("other", ["begins meanwhile", "is about to add", "is about to add, since somebody looked"])
def test_another_thread_never_adds_at_once(other, existing, mode, make_layer, assert_close, monkeypatch):
    """One that begins while a GEMM adds in place waits. One that is about to add runs hooks of the node already, so
    that a hook that is added now would not run: then the GEMM adds nowhere, and PyTorch adds its result.
    """
    layer, slow = make_layer("linear"), Slow(monkeypatch)
    if existing:
        start(layer)
    (param,), (wgrad,) = layer.params, layer.wgrads()
    # Not in the thread: in torch 2.15 two threads that make the AccumulateGrad node of a parameter can wait for each
    # other, one with the node's mutex for the GIL, one in `Function.apply` with the GIL for the mutex.
    loss, node, inside = 5 * param.sum(), get_gradient_edge(param).node, threading.Event()

    def hold(_):
        if threading.current_thread() is thread:
            inside.set()
            assert slow.began.wait(20)

    def plain():
        assert about_to_add or slow.began.wait(20)
        loss.backward()
        slow.wait_for.set()

    about_to_add, thread = other != "begins meanwhile", threading.Thread(target=plain)
    if about_to_add:
        node.register_prehook(hold)
    if "since" in other:
        answers, real = [False], engine.others_run_backward
        monkeypatch.setattr(engine, "others_run_backward", lambda: answers.pop() if answers else real())
    if mode == "delayed":
        run = fused_step(layer, mode).run
    else:
        x, dy = layer.batch(1)
        run = partial(layer(x, accumulate_wgrad=mode).backward, dy)
    thread.start()
    assert not about_to_add or inside.wait(20)
    run()
    thread.join()
    assert_close(layer.grads(), [2 * existing + wgrad + 5])
    in_place = mode == "delayed" or (existing and mode != "off")
    assert slow.waited == [about_to_add or not in_place]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", ["auto", "delayed"])
def test_what_makes_others_wait_goes_with_the_gemm(mode, fails, make_layer, monkeypatch):
    layer, calls = make_layer("linear"), []
    start(layer)
    (param,) = layer.params
    node = get_gradient_edge(param).node  # keeps the node alive, with its hooks
    monkeypatch.setattr(engine, "other_threads", lambda: True)
    monkeypatch.setattr(destination, "_wait", lambda *_: calls.append("waited"))
    gemm = ops.grouped_wgrad_

    def observed(*args):
        torch.autograd.backward([param], [torch.zeros_like(param)])
        if fails:
            raise RuntimeError("failed")
        return gemm(*args)

    monkeypatch.setattr(ops, "grouped_wgrad_", observed)

    def step():
        queue = fused_step(layer, mode)
        try:
            queue.run()
        finally:
            queue.clear()

    with pytest.raises(RuntimeError, match="failed") if fails else nullcontext():
        step()
    assert calls == ["waited"]
    param.sum().backward()
    assert calls == ["waited"]
    assert node is get_gradient_edge(param).node
