"""Every cell of the gradient contract inside `torch.compile(fullgraph=True)`: right, or refused with a clear error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from contract.return_rows import ABSENT, ROWS, Row, check
from support.compiler import DYNAMO_WARNS, in_graphs
from support.contract_helpers import plus, stale
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.autograd import compiled

pytestmark = [in_graphs, pytest.mark.sparse, *DYNAMO_WARNS]
LAYERS = pytest.mark.parametrize(("kind", "packed"), [("linear", True), ("mlp", False), ("moe", True)])


def compiles(layer: type, *, fullgraph: bool) -> type:
    """The class, with calls that run in graphs."""
    torch._dynamo.reset()
    run = torch.compile(layer.__call__, fullgraph=fullgraph, backend="aot_eager")

    class Compiled(layer):
        def __call__(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            return run(self, x, **options)

    return Compiled


@pytest.fixture
def make_compiled(make_layer):
    """Layers as `make_layer` makes them, compiled."""
    return compiles(make_layer, fullgraph=True)


def is_compiled(row):
    """Tell whether compiling the row tells more than the others do."""
    attributes = [False] if row.main_grad and not row.fused else [ABSENT, False]
    return not row.delayed and row.attribute in attributes


@pytest.mark.parametrize("row", [row for row in ROWS if is_compiled(row)], ids=str)
def test_row(row, make_compiled, assert_close):
    check(row, make_compiled("linear"), assert_close)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [Row("off"), Row("grad", existing=True), Row("auto", True, True, overwrite=True)], ids=str
)
def test_a_graph_that_breaks_right_before_the_layer(row, make_layer, assert_close, monkeypatch):
    for function in (compiled._Linear, compiled._MLP):
        monkeypatch.setattr(function, "apply", torch.compiler.disable(function.apply))
    check(row, compiles(make_layer, fullgraph=False)("linear"), assert_close)


@pytest.mark.slow
@LAYERS
def test_biases_and_layouts(kind, packed, make_compiled, assert_close):
    layer = make_compiled(kind, packed, bias=True, layout="in_out")
    before, wgrads = layer.attach(False), layer.wgrads()
    layer.backward()
    count = len(layer.params)
    assert_close(layer.main_grads(), plus(before, wgrads[:count]))
    assert_close([bias.grad for bias in layer.biases], wgrads[count:])


def test_auto_decides_for_each_weight(make_compiled, assert_close):
    layer = make_compiled("mlp")
    fc1, fc2 = layer.params
    fc2.main_grad = torch.ones_like(fc2)
    layer.backward()
    assert_close([fc1.grad, fc2.main_grad - 1], layer.wgrads())
    assert fc2.grad is None


@pytest.mark.slow
@LAYERS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_first_gradient_to_arrive_overwrites(kind, packed, order, make_compiled, assert_close):
    layer = make_compiled(kind, packed)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    buffer.flat.fill_(torch.nan)
    buffer.zero_grad()
    batches = [layer.batch(i) for i in range(2)]
    outputs = [layer(x) for x, _ in batches]
    for i in order:
        outputs[i].backward(batches[i][1])
    assert_close(layer.main_grads(), layer.wgrads(0, 1))


# Each runs backwards of a compiled layer and of an eager one of its weights; returns what the gradients are added to,
# if not to what was in main_grad before.


def backward_twice(layer, eager):
    x, dy = layer.batch(1)
    y = layer(x)
    y.backward(dy, retain_graph=True)
    y.backward(dy)


def backward_into_another_main_grad(layer, eager):
    layer.backward(1)
    start = layer.attach(False)
    layer.backward(2)
    return start


def backward_after_evaluation(layer, eager):
    with torch.no_grad():
        layer(layer.batch(1)[0], wgrad_queue=fusedmlp.WgradQueue())
    eager.backward(1)
    layer(layer.batch(1)[0])  # no backward
    eager.backward(2)


def one_backward_of_both(layer, eager):
    (x1, dy1), (x2, dy2) = layer.batch(1), layer.batch(2)
    torch.autograd.backward([layer(x1), eager(x2)], [dy1, dy2])


def backwards_of_which_some_overwrite(layer, eager):
    for seed in (5, 1):
        layer.backward(seed, overwrites=True)
        layer.backward(2)
    return [0, 0]


@pytest.mark.parametrize(
    ("run", "seeds"),
    [
        (backward_twice, (1, 1)),
        (backward_into_another_main_grad, (2,)),
        (backward_after_evaluation, (1, 2)),
        (one_backward_of_both, (1, 2)),
        (backwards_of_which_some_overwrite, (1, 2)),
    ],
)
def test_several_backwards(run, seeds, make_compiled, make_layer, assert_close):
    layer, eager = make_compiled("mlp"), make_layer("mlp")
    eager.groups, eager.params = layer.groups, layer.params
    before = layer.attach(False)
    start = run(layer, eager)
    assert_close(layer.main_grads(), plus(before if start is None else start, layer.wgrads(*seeds)))


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_one_weight_used_twice_and_in_plain_pytorch_in_one_graph(first, make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer("linear")
    (before,), (weight,) = layer.attach(False), layer.params
    if first:
        del weight.main_grad
        buffer = fusedmlp.MainGradBuffer([weight])
        before.zero_()
        weight.main_grad.fill_(float("nan"))
        buffer.zero_grad()
    (x1, dy1), (x2, dy2) = layer.batch(1), layer.batch(2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x1, x2):
        y1, y2 = layer(x1), layer(x2)
        return y1, y2 * 2, (weight * 3).sum()

    torch.autograd.backward(run(x1, x2), [dy1, dy2, torch.ones(())])
    expected = before + layer.wgrads(1)[0] + 2 * layer.wgrads(2)[0] + 3
    assert_close([weight.main_grad], [expected])
    assert weight.grad is weight.main_grad if first else not weight.grad.any()
    layer.backward(1)
    assert_close([weight.main_grad], [expected + layer.wgrads(1)[0]])


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("around", ["save_on_cpu", "checkpoint", "reentrant checkpoint", "checkpoint inside"])
def test_saved_tensors_that_others_handle(around, first, make_layer, make_compiled, assert_close):
    inside, reentrant = around == "checkpoint inside", around == "reentrant checkpoint"
    layer = stale((make_layer if inside else make_compiled)("mlp"), overwrites=first)
    before, (x, dy) = [0, 0] if first else layer.attach(False), layer.batch(1)
    checkpointed = partial(checkpoint, layer, use_reentrant=reentrant)
    if around == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            y = layer(x.requires_grad_())
    else:
        run = torch.compile(lambda x: checkpointed(x), fullgraph=True, backend="aot_eager") if inside else checkpointed
        y = run(x.requires_grad_())
    y.backward(dy)
    assert_close(layer.main_grads(), plus(before, layer.wgrads()))
    assert all(param.grad_added_to_main_grad for param in layer.params)


@pytest.mark.parametrize("mode", ["main_grad", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("packed", [True, False])
def test_frozen_weights_among_trained_ones(packed, mode, make_compiled, assert_close):
    layer = make_compiled("mlp", packed, bias=packed)
    before, wgrads, frozen = layer.attach(False), layer.wgrads(), {0} if packed else {0, 4}
    for i in frozen:
        layer.params[i].requires_grad_(False)
        if not packed:
            del layer.params[i].main_grad
    for bias in layer.biases[1:]:
        bias.requires_grad_(False)
    layer.backward(accumulate_wgrad=mode)
    for i, param in enumerate(layer.params):
        if i in frozen:
            assert (param.grad, param.grad_added_to_main_grad) == (None, False)
            assert torch.equal(getattr(param, "main_grad", before[i]), before[i])
        elif mode == "off":
            assert_close([param.grad, param.main_grad], [wgrads[i], before[i]])
        else:
            assert_close([param.main_grad], [before[i] + wgrads[i]])
    assert_close([bias.grad for bias in layer.biases[:1]], wgrads[2:3] if packed else [])


# What a graph cannot have runs outside of it, if it may break.


@pytest.mark.slow
def test_without_fullgraph_gradients_may_be_delayed(make_layer, assert_close):
    layer, queue = compiles(make_layer, fullgraph=False)("mlp"), fusedmlp.WgradQueue()
    before = layer.attach(False)
    layer.backward(wgrad_queue=queue)
    assert len(queue) == 2
    queue.run()
    assert_close(layer.main_grads(), plus(before, layer.wgrads()))


@pytest.mark.slow
def test_without_fullgraph_experts_may_share_a_parameter(make_layer, assert_close):
    layer = compiles(make_layer, fullgraph=False)("linear", False)
    layer.groups[0][2] = layer.groups[0][0]
    layer.backward()
    first, _, third = layer.wgrads()
    assert_close([layer.params[0].grad], [first + third])


# Refusals. Errors while Dynamo traces are its own, with ours inside.
TRACED = torch._dynamo.exc.Unsupported


def set_wrong_main_grad(layer):
    for param in layer.params:
        param.main_grad = param.main_grad[..., :-1]


def set_fsdp_parameters(layer):
    for param in layer.params:
        param.__fsdp_param__, param.get_main_grad = True, lambda param=param: param.main_grad


def use_a_product(layer):
    product = layer.params[0] * 1
    product.main_grad = torch.zeros_like(product, requires_grad=False)
    layer.groups = [[product]]


def share_a_parameter(layer):
    layer.groups[0][1] = layer.groups[0][0]


def share_a_main_grad(layer):
    layer.params[1].main_grad = layer.params[0].main_grad


MAIN_GRAD = {"accumulate_wgrad": "main_grad"}
IN_FORWARD = {  # what is done to a layer, whether it is packed, options, and the error
    r"wgrad_queue \(delay_wgrad=True\) inside": (None, True, {"wgrad_queue": fusedmlp.WgradQueue()}, TRACED),
    "weight: .* expects a main_grad": (lambda layer: delattr(layer.params[0], "main_grad"), True, MAIN_GRAD, TRACED),
    "experts 0 and 1 differ": (lambda layer: delattr(layer.params[0], "main_grad"), False, {}, TRACED),
    "weight: a parameter of Megatron-FSDP inside torch.compile": (set_fsdp_parameters, True, {}, TRACED),
    "weight: expected main_grad of shape": (set_wrong_main_grad, True, MAIN_GRAD, ValueError),
    "weight: the parameter has a tensor hook": (
        lambda layer: layer.params[0].register_hook(lambda grad: None),
        True,
        {},
        RuntimeError,
    ),
    "weight: .* needs a leaf parameter": (use_a_product, True, {}, TRACED),
    "duplicate tensor input": (share_a_parameter, False, {}, TRACED),
    "weight: expected a main_grad of its own for every parameter": (share_a_main_grad, False, {}, RuntimeError),
}


@pytest.mark.parametrize("message", IN_FORWARD)
def test_refused_in_forward(message, make_compiled):
    prepare, packed, options, error = IN_FORWARD[message]
    layer = make_compiled("linear", packed)
    layer.attach(False)
    if prepare is not None:
        prepare(layer)
    with pytest.raises(error, match=message):
        layer(layer.batch(1)[0], **options)


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["module", "ddp"])
def test_stock_ddp_takes_gradients_and_refuses_main_grad(outer, ddp, assert_close):
    torch._dynamo.reset()
    module = fusedmlp.GroupedLinear(2, 4, 3)
    x, counts = torch.randn(5, 4), torch.tensor([2, 3])
    (expected,) = torch.autograd.grad(module(x, counts).sum(), module.weight)
    if outer == "module":
        model = ddp(torch.compile(module, fullgraph=True, backend="aot_eager"))
    else:
        model = torch.compile(ddp(module), backend="aot_eager")
    model(x, counts).sum().backward()
    assert_close([module.weight.grad], [expected])
    module.weight.main_grad = torch.zeros_like(module.weight)
    with pytest.raises(RuntimeError, match=r"weight: DistributedDataParallel .*would miss one in main_grad"):
        model(x, counts)


def differentiate_twice(y, x, dy, weight):
    (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
    dx.sum().backward()


def replace_main_grad(y, x, dy, weight):
    weight.main_grad = weight.main_grad.clone()
    y.backward(dy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda y, x, dy, weight: torch.autograd.grad(y, weight, dy), "this one must not"),
        (lambda y, x, dy, weight: torch.autograd.grad(y, x, dy), "this one must not"),
        (lambda y, x, dy, weight: y.backward(dy, inputs=[x]), "this one must not"),
        (differentiate_twice, "create_graph=True"),
        (replace_main_grad, "another one since"),
        (None, r"weight: .* a torch\.func transform"),
    ],
    ids=["autograd.grad of the weight", "of x", "backward(inputs=[x])", "twice", "another main_grad", "torch.func"],
)
def test_refused_in_backward(backward, message, make_layer, make_compiled):
    layer = make_compiled("linear") if backward else make_layer("linear")
    (before,), (x, dy), (weight,) = layer.attach(False), layer.batch(1), layer.params
    if backward is None:
        run = torch.compile(torch.func.grad(lambda x: layer(x).nansum()), fullgraph=True, backend="aot_eager")
    else:
        y = layer(x.requires_grad_())
    with pytest.raises(RuntimeError, match=message):
        backward(y, x, dy, weight) if backward else run(x)
    assert torch.equal(weight.main_grad, before)
    assert (weight.grad, weight.grad_added_to_main_grad) == (None, False)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.bfloat16), "weight: expected all experts to accumulate in one dtype"),
        (torch.zeros(4, 3).T, r"weight\[1\]: expected a gradient with the strides of expert 0's"),
    ],
    ids=["dtype", "layout"],
)
def test_experts_of_a_compiled_layer_accumulate_in_one_dtype_and_layout(other, message):
    weights = [torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16)) for _ in range(2)]
    targets = [torch.zeros(3, 4), other]
    for weight, target in zip(weights, targets, strict=True):
        weight.main_grad = target
    with pytest.raises(ValueError, match=message):
        compiled.enter_forward(torch.zeros(3, dtype=torch.int32), weights, targets, "weight", [2], True)
