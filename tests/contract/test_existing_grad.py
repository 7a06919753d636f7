"""`"auto"` and `"grad"` with an existing `.grad`: the GEMM adds into it where it may; else the gradient is returned."""

import threading
from contextlib import nullcontext

import pytest
import torch
from support.contract_helpers import in_threads
from torch.autograd.graph import get_gradient_edge

import fusedmlp
from fusedmlp.contract import engine, exclusion
from fusedmlp.operators import ops

pytestmark = pytest.mark.usefixtures("nan_in_empty")

MODES = pytest.mark.parametrize("mode", ["auto", "grad"])
LAYERS = pytest.mark.parametrize(
    ("kind", "packed"),
    [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", True), ("moe", False)],
)


def start(layer, value=2.0):
    for param in layer.params:
        param.grad = torch.full_like(param, value)
    return [param.grad for param in layer.params]


@LAYERS
@MODES
def test_the_gemm_adds_into_an_existing_grad(mode, kind, packed, wgrad_gemms, make_layer, assert_close):
    layer = make_layer(kind, packed)
    layer.backward(1, accumulate_wgrad=mode)
    assert not any(accumulate for *_, accumulate in wgrad_gemms.calls)
    wgrad_gemms.calls.clear()
    grads, pointers = layer.grads(), {g.data_ptr() for g in layer.grads()}
    layer.backward(2, accumulate_wgrad=mode)
    assert all(accumulate for *_, accumulate in wgrad_gemms.calls)
    assert {*wgrad_gemms.pointers} == pointers
    assert all(param.grad is grad for param, grad in zip(layer.params, grads, strict=True))
    assert_close(layer.grads(), layer.wgrads(1, 2))


@MODES
def test_weights_that_are_no_leaves_return_the_gradient(mode, wgrad_gemms, make_layer, assert_close):
    """LoRA on experts: the weight is a sum, and the gradient flows through it."""
    layer = make_layer("linear")
    (base,) = layer.params
    base.requires_grad_(False)
    a = torch.nn.Parameter(torch.randn(3, 2, base.shape[2]))
    b = torch.nn.Parameter(torch.randn(3, base.shape[1], 2))
    with torch.no_grad():
        layer.params[0].copy_(base - b @ a)  # so that base + b @ a is the weight that it was
    (wgrad,) = make_layer("linear").wgrads()
    for factor in (a, b):
        factor.grad = torch.ones_like(factor)
    layer.groups = [[base + b @ a]]
    layer.backward(accumulate_wgrad=mode)
    assert_close([a.grad - 1, b.grad - 1], [b.mT.double() @ wgrad, wgrad @ a.mT.double()])
    assert not {*wgrad_gemms.pointers} & {a.grad.data_ptr(), b.grad.data_ptr()}


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


def sparse(grad):
    return grad.to_sparse()


def recorded(grad):
    return grad.requires_grad_()


def other_dtype(grad):
    return grad.double()


def other_strides(grad):
    return grad.mT.contiguous().mT


UNSUITABLE = {
    "sparse": (sparse, True, "dense; got one in torch.sparse_coo"),
    "requires grad": (recorded, True, "requires_grad=False; got True"),
    "dtype": (other_dtype, True, "got torch.float64"),
    "strides unlike other experts'": (other_strides, False, "strides of expert 0's"),
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


@MODES
def test_an_expert_without_grad_beside_experts_with_one(mode, wgrad_gemms, make_layer, assert_close):
    layer = make_layer("linear", packed=False)
    start(layer)
    layer.params[0].grad = None
    layer.backward(accumulate_wgrad=mode)
    first, second, third = layer.wgrads()
    assert_close(layer.grads(), [first, 2 + second, 2 + third])
    assert {p.grad.data_ptr() for p in layer.params[1:]} <= {*wgrad_gemms.pointers}


@pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning")
@pytest.mark.parametrize("mode", ["auto", "grad", "off"])
def test_create_graph_leaves_the_old_grad_alone(mode, make_layer, assert_close):
    """PyTorch, too, makes the sum a new tensor with a graph; ours raises when it is differentiated."""
    layer = make_layer()
    before = start(layer)
    x, dy = layer.batch(1)
    layer(x, accumulate_wgrad=mode).backward(dy.requires_grad_(), create_graph=True)
    assert all(torch.equal(b, torch.full_like(b, 2.0)) for b in before)
    assert_close([g.detach() for g in layer.grads()], [2 + w for w in layer.wgrads()])
    with pytest.raises(RuntimeError, match="double backward"):
        sum(g.square().sum() for g in layer.grads()).backward()


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


def fused_step(layer, mode):
    queue = fusedmlp.WgradQueue() if mode == "delayed" else None
    layer.backward(accumulate_wgrad="auto" if queue is not None else mode, wgrad_queue=queue)
    return queue


def check_sum(layer, existing, assert_close):
    (wgrad,) = layer.wgrads()
    assert_close(layer.grads(), [2 * existing + wgrad + 5])


THREADED = pytest.mark.parametrize("mode", ["auto", "grad", "off", "delayed"])
EXISTING = pytest.mark.parametrize("existing", [True, False])


@THREADED
@EXISTING
def test_plain_pytorch_that_begins_while_a_gemm_adds_waits(existing, mode, make_layer, assert_close, monkeypatch):
    layer, slow = make_layer("linear"), Slow(monkeypatch)
    if existing:
        start(layer)
    (param,) = layer.params
    # Not in the thread: in torch 2.15 two threads that make the AccumulateGrad node of a parameter can wait for each
    # other, one with the node's mutex for the GIL, one in `Function.apply` with the GIL for the mutex.
    loss = 5 * param.sum()

    def fused():
        queue = fused_step(layer, mode)
        if queue is not None:
            queue.run()

    def plain():
        assert slow.began.wait(20)
        loss.backward()
        slow.wait_for.set()

    in_threads(fused, plain)
    check_sum(layer, existing, assert_close)
    in_place = mode == "delayed" or (existing and mode != "off")
    assert slow.waited == [not in_place]


@pytest.mark.parametrize("looks", ["at once", "since it looked"])
@THREADED
@EXISTING
def test_no_gemm_adds_where_plain_pytorch_is_about_to(existing, mode, looks, make_layer, assert_close, monkeypatch):
    """The other thread already runs hooks of the node, so that a hook that is added now would not run."""
    layer, slow = make_layer("linear"), Slow(monkeypatch)
    if existing:
        start(layer)
    (param,) = layer.params
    node, inside = get_gradient_edge(param).node, threading.Event()

    def hold(_):
        if threading.current_thread() is other:
            inside.set()
            assert slow.began.wait(20)

    node.register_prehook(hold)
    if looks == "since it looked":
        answers, real = [False], engine.others_run_backward
        monkeypatch.setattr(engine, "others_run_backward", lambda: answers.pop() if answers else real())
    loss = 5 * param.sum()

    def plain():
        loss.backward()
        slow.wait_for.set()

    other = threading.Thread(target=plain)
    if mode == "delayed":
        queue = fused_step(layer, mode)
        other.start()
        assert inside.wait(20)
        queue.run()
    else:
        x, dy = layer.batch(1)
        y = layer(x, accumulate_wgrad=mode)
        other.start()
        assert inside.wait(20)
        y.backward(dy)
    other.join()
    check_sum(layer, existing, assert_close)
    assert slow.waited == [True]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", ["auto", "delayed"])
def test_what_makes_others_wait_goes_with_the_gemm(mode, fails, make_layer, monkeypatch):
    layer, calls = make_layer("linear"), []
    start(layer)
    (param,) = layer.params
    node = get_gradient_edge(param).node  # keeps the node alive, with its hooks
    monkeypatch.setattr(engine, "other_threads", lambda: True)
    monkeypatch.setattr(exclusion, "_wait", lambda *_: calls.append("waited"))
    gemm = ops.grouped_wgrad_

    def observed(*args):
        torch.autograd.backward([param], [torch.zeros_like(param)])
        if fails:
            raise RuntimeError("failed")
        return gemm(*args)

    monkeypatch.setattr(ops, "grouped_wgrad_", observed)

    def step():
        queue = fused_step(layer, mode)
        if queue is not None:
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
