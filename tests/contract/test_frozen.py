"""Weights that are frozen: before forward, between forward and backward, between a gradient and the optimizer."""

import pytest
import torch
from contract.return_rows import Case, Row
from support.compiler import DYNAMO_WARNS, in_graphs
from support.contract_helpers import PACKED, plain, unchanged

import fusedmlp

pytestmark = DYNAMO_WARNS

ROWS = [
    *(Row("off", existing=existing, delayed=delayed) for existing in (False, True) for delayed in (False, True)),
    Row("grad"),
    Row("grad", existing=True),
    Row("auto", True, False),
    Row("main_grad", True),
    *(Row("main_grad", True, False, delayed, overwrite) for delayed in (False, True) for overwrite in (False, True)),
]
FROZEN = {  # which weights, of fc1 and then of fc2
    "all": lambda i, count: True,
    "fc1": lambda i, count: i < count // 2,
    "fc2": lambda i, count: i >= count // 2,
    "every other": lambda i, count: i % 2 == 0,
}


def freeze(params, frozen, *, thaw=False):
    """Freeze, or thaw, some of the parameters; return which."""
    gone = [FROZEN[frozen](i, len(params)) for i in range(len(params))]
    for param, mine in zip(params, gone, strict=True):
        if mine:
            param.requires_grad_(thaw)
    return gone


@pytest.mark.parametrize("when", ["before forward", "between forward and backward"])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("moe", True)])
def test_a_frozen_weight_gets_no_gradient_until_it_thaws(
    kind, packed, row, frozen, when, wgrad_gemms, make_layer, assert_close
):
    """Others, and x, get theirs; a weight without one costs no GEMM; one that thaws adds to what main_grad holds."""
    layer = make_layer(kind, packed)
    case, (x, dy) = Case(row, layer, assert_close), layer.batch(1)
    if when == "before forward":
        freeze(layer.params, frozen)
    y = layer(x.requires_grad_(), **case.options)
    gone = freeze(layer.params, frozen)
    y.backward(dy)
    half = len(gone) // 2
    trained = [name for name, of in (("fc1", gone[:half]), ("fc2", gone[half:])) if not all(of)]
    assert [name for name, *_ in wgrad_gemms.calls] == ([] if row.delayed else trained)
    assert case.queue is None or len(case.queue) == len(trained)
    case.run_queue()
    case.check([None if g else w for g, w in zip(gone, layer.wgrads(1), strict=True)])
    wide = x.detach().double().requires_grad_()
    layer.loop(wide, [p.detach().double() for p in layer.params]).backward(dy[:5].double())
    assert_close([x.grad[:5]], [wide.grad[:5]])

    freeze(layer.params, frozen, thaw=True)
    for param, g in zip(layer.params, gone, strict=True):
        param.overwrite_main_grad = row.overwrite and g
    layer.backward(2, **case.options)
    case.run_queue()
    case.check(
        [second if g else both for g, second, both in zip(gone, layer.wgrads(2), layer.wgrads(1, 2), strict=True)]
    )


@pytest.mark.parametrize("case", ["as it is", "after a fused one", "overwrite_main_grad"])
def test_a_plain_gradient_of_a_frozen_weight_is_dropped_too(case, make_layer):
    layer, flag = make_layer(), case == "after a fused one"
    layer.attach(False)
    if flag:
        layer.backward(2)
    for param in layer.params:
        param.grad, param.overwrite_main_grad = None, case == "overwrite_main_grad"
    before, (x, dy) = [main.clone() for main in layer.main_grads()], layer.batch(1)
    loss = (layer(x) * dy).nansum() + plain(layer)
    freeze(layer.params, "all")
    loss.backward()
    assert layer.grads() == [None, None]
    assert unchanged(layer.main_grads(), before)
    assert [p.grad_added_to_main_grad for p in layer.params] == [flag, flag]


@pytest.mark.slow
@in_graphs
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("frozen", ["all", "every other"])
@PACKED
def test_a_compiled_backward_refuses_a_weight_frozen_since_forward(packed, frozen, first, make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer("mlp", packed)
    before, (x, dy) = layer.attach(False), layer.batch(1)
    run = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")
    y = run(layer, x.requires_grad_())
    for param in layer.params:
        param.overwrite_main_grad = first
    freeze(layer.params, frozen)
    with pytest.raises(RuntimeError, match=r"weight.*a parameter frozen since forward"):
        y.backward(dy)
    assert unchanged(layer.main_grads(), before)
    assert not any(p.grad_added_to_main_grad for p in layer.params)
    assert layer.grads() == [None] * len(layer.params)
    freeze(layer.params, frozen, thaw=True)
    run(layer, x).backward(dy)
    assert_close(layer.main_grads(), [w + (0 if first else b) for b, w in zip(before, layer.wgrads(1), strict=True)])


@pytest.mark.slow
@in_graphs
@pytest.mark.parametrize("row", [Row("off"), Row("grad"), Row("grad", existing=True)], ids=str)
def test_a_compiled_backward_that_returns_gradients_drops_that_of_a_frozen_weight(row, make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer()
    case, (x, dy) = Case(row, layer, assert_close), layer.batch(1)
    y = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")(layer, x, **case.options)
    freeze(layer.params, "fc1")
    y.backward(dy)
    case.check([None, layer.wgrads(1)[1]])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("what", ["weight", "weight, delayed", "bias", "weight, not fused"])
def test_a_weight_frozen_after_its_gradient_came_still_steps(what, zeros, make_layer, assert_close):
    """As in PyTorch: weight decay moves it, also where the gradient is zero. One that got none in this step stays."""
    layer, queue = make_layer(bias=True), fusedmlp.WgradQueue()
    unused = torch.nn.Parameter(torch.ones(4))
    tensors = [*layer.params, *layer.biases, unused]
    _kept = fusedmlp.MainGradBuffer(tensors)
    x, dy = layer.batch(1)
    options = {"wgrad_queue": queue} if "delayed" in what else {}
    layer(x, accumulate_wgrad="off" if "not fused" in what else "auto", **options).backward(dy * (not zeros))
    queue.run()
    for param in (layer.biases[0] if what == "bias" else layer.params[0], unused):
        param.requires_grad_(False)
    assert_close([p.grad for p in tensors[:-1]], [w * (not zeros) for w in layer.wgrads(1)])
    assert all(p.grad.is_contiguous() for p in tensors[:-1])  # no dummy: fused optimizers would read past its end
    held = [p.detach().clone() for p in tensors]
    torch.optim.AdamW(tensors, lr=0.1, weight_decay=0.5).step()
    assert [torch.equal(p, h) for p, h in zip(tensors, held, strict=True)] == [False] * 4 + [True]
