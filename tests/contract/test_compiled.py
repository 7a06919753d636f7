"""Every cell of the gradient contract inside `torch.compile(fullgraph=True)`: right, or refused with a clear error."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.compiler import in_graphs
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.autograd import compiled

ABSENT = None
# Dynamo itself instantiates an autograd.Function while it traces one, and looks at .grad of every input.
pytestmark = [
    in_graphs,
    pytest.mark.sparse,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
LAYERS = pytest.mark.parametrize(("kind", "packed"), [("linear", True), ("mlp", False), ("moe", True)])


@pytest.fixture
def make_compiled(make_layer):
    """Layers as `make_layer` makes them, each compiled afresh."""
    torch._dynamo.reset()

    def make(*args: Any, **options: Any) -> Any:
        run = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")

        class Compiled(make_layer):
            def __call__(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
                return run(self, x, **options)

        return Compiled(*args, **options)

    return make


class Row(NamedTuple):
    mode: str
    main_grad: str  # "-", "kept", "+ wgrad" (added to) or "wgrad" (overwritten)
    attribute: bool | None  # grad_added_to_main_grad before
    grad: str  # what .grad holds afterwards: "None", "zeros", "wgrad"; "+ wgrad": it held something before
    overwrite: bool = False  # overwrite_main_grad

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items() if value != "")


ROWS = [
    Row("off", "-", ABSENT, "wgrad"),
    Row("auto", "-", ABSENT, "wgrad"),
    Row("grad", "-", ABSENT, "wgrad"),
    Row("grad", "-", ABSENT, "+ wgrad"),
    Row("off", "kept", False, "wgrad"),
    Row("grad", "kept", False, "wgrad"),
    Row("auto", "+ wgrad", ABSENT, "None"),
    Row("auto", "+ wgrad", False, "zeros"),
    Row("main_grad", "+ wgrad", ABSENT, "None"),
    Row("main_grad", "+ wgrad", True, "zeros"),
    Row("auto", "wgrad", ABSENT, "None", True),
    Row("auto", "wgrad", True, "zeros", True),
    Row("main_grad", "wgrad", False, "zeros", True),
    Row("off", "kept", False, "wgrad", True),
]


def check_row(row: Row, layer: Any, assert_close: Any) -> None:
    wgrads, options = layer.wgrads(), {"accumulate_wgrad": row.mode}
    main_grads = layer.attach(row.attribute) if row.main_grad != "-" else []
    if row.overwrite and row.main_grad == "wgrad":
        for param in layer.params:
            param.main_grad.fill_(float("nan"))
    for param in layer.params:
        if row.overwrite:
            param.overwrite_main_grad = True
        if row.grad == "+ wgrad":
            param.grad = torch.full_like(param, 2.0)
    x, dy = layer.batch(1)
    y = layer(x, **options)
    if row.attribute is False:
        assert not any(param.grad_added_to_main_grad for param in layer.params)  # not before backward
    y.backward(dy)
    for i, param in enumerate(layer.params):
        if row.grad == "None":
            assert param.grad is None
        elif row.grad == "zeros":
            assert torch.equal(param.grad, torch.zeros_like(param))
            assert not any(param.grad.stride()), "a dummy that costs memory"
        else:
            assert_close([param.grad], [wgrads[i] + (2 if row.grad == "+ wgrad" else 0)])
        if row.main_grad == "kept":
            assert torch.equal(param.main_grad, main_grads[i])
        elif row.main_grad != "-":
            assert_close([param.main_grad], [wgrads[i] + (main_grads[i] if row.main_grad == "+ wgrad" else 0)])
        fused = row.main_grad in ("+ wgrad", "wgrad")
        assert getattr(param, "grad_added_to_main_grad", ABSENT) == (True if fused else row.attribute) or (
            row.attribute is ABSENT and not hasattr(param, "grad_added_to_main_grad")
        )


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matrix(row, make_compiled, assert_close):
    check_row(row, make_compiled("linear"), assert_close)


@pytest.mark.slow
@LAYERS
def test_biases_and_layouts(kind, packed, make_compiled, assert_close):
    layer = make_compiled(kind, packed, bias=True, layout="in_out")
    before, wgrads = layer.attach(False), layer.wgrads()
    layer.backward()
    count = len(layer.params)
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, wgrads[:count], strict=True)])
    assert_close([bias.grad for bias in layer.biases], wgrads[count:])


@pytest.mark.slow
@LAYERS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_first_gradient_to_arrive_overwrites(kind, packed, order, make_compiled, assert_close):
    layer = make_compiled(kind, packed)
    buffer = fusedmlp.MainGradBuffer(layer.params)
    buffer.flat.fill_(torch.nan)
    buffer.zero_grad()
    outputs = []
    for i in range(2):  # two forwards, then two backwards
        x, dy = layer.batch(i)
        outputs.append((layer(x), dy))
    for i in order:
        y, dy = outputs[i]
        y.backward(dy)
    assert_close(layer.main_grads(), layer.wgrads(0, 1))


def test_overwriting_is_for_one_step_only(make_compiled, assert_close):
    layer = make_compiled("linear")
    layer.attach()
    for seed in (1, 2):
        layer.backward(seed, overwrites=True)
        layer.backward(seed + 10, overwrites=False)
        assert_close(layer.main_grads(), layer.wgrads(seed, seed + 10))


def test_auto_decides_for_each_weight(make_compiled, assert_close):
    layer = make_compiled("mlp")
    fc1, fc2 = layer.params
    fc2.main_grad = torch.ones_like(fc2)
    layer.backward()
    assert_close([fc1.grad, fc2.main_grad - 1], layer.wgrads())
    assert fc2.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["main_grad", "off"])
def test_frozen_experts_among_trained_ones(mode, make_compiled, assert_close):
    layer = make_compiled("mlp", False)
    before, wgrads = layer.attach(False), layer.wgrads()
    frozen = {0, 4}
    for i in frozen:
        layer.params[i].requires_grad_(False)
        del layer.params[i].main_grad
    layer.backward(accumulate_wgrad=mode)
    for i, param in enumerate(layer.params):
        if i in frozen:
            assert (param.grad, param.grad_added_to_main_grad) == (None, False)
        elif mode == "off":
            assert_close([param.grad, param.main_grad], [wgrads[i], before[i]])
        else:
            assert_close([param.main_grad], [before[i] + wgrads[i]])


def test_a_wholly_frozen_weight(make_compiled, assert_close):
    layer = make_compiled("mlp", bias=True)
    before, wgrads = layer.attach(False), layer.wgrads()
    for frozen in (layer.params[0], layer.biases[1]):
        frozen.requires_grad_(False)
    layer.backward()
    assert_close([layer.params[1].main_grad, layer.biases[0].grad], [before[1] + wgrads[1], wgrads[2]])
    assert torch.equal(layer.params[0].main_grad, before[0])


@pytest.mark.slow
def test_without_fullgraph_what_is_refused_runs_outside_of_the_graph(make_layer, assert_close):
    torch._dynamo.reset()
    layer, queue = make_layer("mlp"), fusedmlp.WgradQueue()
    before, (x, dy) = layer.attach(False), layer.batch(1)
    run = torch.compile(lambda x: layer(x, wgrad_queue=queue) * 2, backend="aot_eager")
    run(x).backward(dy)
    assert len(queue) == 2
    queue.run()
    assert_close(layer.main_grads(), [b + 2 * w for b, w in zip(before, layer.wgrads(), strict=True)])


def test_retain_graph_twice_adds_twice(make_compiled, assert_close):
    layer = make_compiled("mlp")
    before, (x, dy) = layer.attach(False), layer.batch(1)
    y = layer(x)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert_close(layer.main_grads(), [b + 2 * w for b, w in zip(before, layer.wgrads(), strict=True)])


def test_main_grad_replaced_between_steps(make_compiled, assert_close):
    layer = make_compiled("linear")
    for seed in (1, 2):
        before = layer.attach(False)
        layer.backward(seed)
        assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(seed), strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_one_weight_used_twice_and_in_plain_pytorch_in_one_graph(first, make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer("linear")
    (before,), (weight,) = layer.attach(False), layer.params
    if first:
        del weight.main_grad
        buffer = fusedmlp.MainGradBuffer([weight])
    (x1, dy1), (x2, dy2) = layer.batch(1), layer.batch(2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x1, x2):
        y1, y2 = layer(x1), layer(x2)
        return y1, y2 * 2, (weight * 3).sum()

    if first:
        before.zero_()
        weight.main_grad.fill_(float("nan"))
        buffer.zero_grad()
    y1, y2, plain = run(x1, x2)
    torch.autograd.backward([y1, y2, plain], [dy1, dy2, torch.ones(())])
    expected = before + layer.wgrads(1)[0] + 2 * layer.wgrads(2)[0] + 3
    assert_close([weight.main_grad], [expected])
    if first:
        assert weight.grad is weight.main_grad
    else:
        assert not weight.grad.any()
    layer.backward(1)
    assert_close([weight.main_grad], [expected + layer.wgrads(1)[0]])


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("around", ["save_on_cpu", "checkpoint", "reentrant checkpoint", "checkpoint inside"])
def test_saved_tensors_that_others_handle(around, first, make_layer, make_compiled, assert_close):
    layer = make_layer("mlp") if around == "checkpoint inside" else make_compiled("mlp")
    before, (x, dy) = layer.attach(False), layer.batch(1)
    x.requires_grad_()

    def checkpointed(x):
        return checkpoint(layer, x, use_reentrant=around == "reentrant checkpoint")

    for param in layer.params if first else []:
        param.main_grad.fill_(float("nan"))
        param.overwrite_main_grad = True
    if around == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            y = layer(x)
    elif around == "checkpoint inside":
        torch._dynamo.reset()
        y = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")(x)
    else:
        y = checkpointed(x)
    y.backward(dy)
    expected = layer.wgrads() if first else [b + w for b, w in zip(before, layer.wgrads(), strict=True)]
    assert_close(layer.main_grads(), expected)
    assert all(param.grad_added_to_main_grad for param in layer.params)


def test_no_grad_leaves_nothing_behind(make_compiled, make_layer, assert_close):
    layer, eager = make_compiled("mlp"), make_layer("mlp")
    before, (x, _) = layer.attach(False), layer.batch(1)
    with torch.no_grad():
        y = layer(x, wgrad_queue=fusedmlp.WgradQueue())
    assert_close([y], [eager(x)])
    eager.groups, eager.params = layer.groups, layer.params
    eager.backward(1)
    layer(x)  # no backward
    eager.backward(2)
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(1, 2), strict=True)])


def test_compiled_and_eager_backwards_in_one(make_compiled, make_layer, assert_close):
    layer, eager = make_compiled("mlp"), make_layer("mlp")
    before = layer.attach(False)
    eager.groups, eager.params = layer.groups, layer.params
    (x1, dy1), (x2, dy2) = layer.batch(1), layer.batch(2)
    torch.autograd.backward([layer(x1), eager(x2)], [dy1, dy2])
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(1, 2), strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("row", [ROWS[0], ROWS[3], ROWS[7], ROWS[12]], ids=str)
def test_a_graph_that_breaks_right_before_the_layer(row, make_layer, assert_close, monkeypatch):
    torch._dynamo.reset()
    for function in (compiled._Linear, compiled._MLP):
        monkeypatch.setattr(function, "apply", torch.compiler.disable(function.apply))
    run = torch.compile(make_layer.__call__, backend="aot_eager")

    class Compiled(make_layer):
        def __call__(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            return run(self, x, **options)

    check_row(row, Compiled("linear"), assert_close)


@pytest.mark.slow
def test_without_fullgraph_experts_may_share_a_parameter(make_layer, assert_close):
    torch._dynamo.reset()
    layer = make_layer("linear", False)
    layer.groups[0][2] = layer.groups[0][0]
    x, dy = layer.batch(1)
    run = torch.compile(make_layer.__call__, backend="aot_eager")
    run(layer, x).backward(dy)
    first, _, third = layer.wgrads()
    assert_close([layer.params[0].grad], [first + third])


# Refusals. Errors while Dynamo traces are its own, with ours inside.
TRACED = torch._dynamo.exc.Unsupported


def set_wrong_main_grad(layer):
    for param in layer.params:
        param.main_grad = param.main_grad[..., :-1]


def set_tensor_hook(layer):
    layer.params[0].register_hook(lambda grad: None)


def set_fsdp_parameters(layer):
    for param in layer.params:
        param.__fsdp_param__, param.get_main_grad = True, lambda param=param: param.main_grad


def remove_main_grad(layer):
    del layer.params[0].main_grad


def use_a_product(layer):
    product = layer.params[0] * 1
    product.main_grad = torch.zeros_like(product, requires_grad=False)
    layer.groups = [[product]]


def share_a_parameter(layer):
    layer.groups[0][1] = layer.groups[0][0]


def share_a_main_grad(layer):
    layer.params[1].main_grad = layer.params[0].main_grad


@pytest.mark.parametrize(
    ("prepare", "packed", "options", "error", "message"),
    [
        (None, True, {"wgrad_queue": fusedmlp.WgradQueue()}, TRACED, r"wgrad_queue \(delay_wgrad=True\) inside"),
        (remove_main_grad, True, {"accumulate_wgrad": "main_grad"}, TRACED, "weight: .* expects a main_grad"),
        (remove_main_grad, False, {}, TRACED, "experts 0 and 1 differ"),
        (set_fsdp_parameters, True, {}, TRACED, "weight: a parameter of Megatron-FSDP inside torch.compile"),
        (
            set_wrong_main_grad,
            True,
            {"accumulate_wgrad": "main_grad"},
            ValueError,
            "weight: expected main_grad of shape",
        ),
        (set_tensor_hook, True, {}, RuntimeError, "weight: the parameter has a tensor hook"),
        (use_a_product, True, {}, TRACED, "weight: .* needs a leaf parameter"),
        (share_a_parameter, False, {}, TRACED, "duplicate tensor input"),
        (share_a_main_grad, False, {}, RuntimeError, "weight: expected a main_grad of its own for every parameter"),
    ],
)
def test_refused_in_forward(prepare, packed, options, error, message, make_compiled):
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


def test_torch_func_is_refused(make_layer):
    layer = make_layer("linear")
    before, (x, _) = layer.attach(False), layer.batch(1)
    torch._dynamo.reset()
    run = torch.compile(torch.func.grad(lambda x: layer(x).nansum()), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"weight: .* a torch\.func transform"):
        run(x)
    assert torch.equal(layer.params[0].main_grad, before[0])
    assert layer.params[0].grad_added_to_main_grad is False


def ask_for_weight_gradient(y, x, dy, weight):
    torch.autograd.grad(y, weight, dy)


def ask_for_input_gradient(y, x, dy, weight):
    torch.autograd.grad(y, x, dy)


def accumulate_into_input_only(y, x, dy, weight):
    y.backward(dy, inputs=[x])


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
        (ask_for_weight_gradient, "this one must not"),
        (ask_for_input_gradient, "this one must not"),
        (accumulate_into_input_only, "this one must not"),
        (differentiate_twice, "create_graph=True"),
        (replace_main_grad, "another one since"),
    ],
)
def test_refused_in_backward(backward, message, make_compiled):
    layer = make_compiled("linear")
    before, (x, dy) = layer.attach(False), layer.batch(1)
    (weight,) = layer.params
    y = layer(x.requires_grad_())
    with pytest.raises(RuntimeError, match=message):
        backward(y, x, dy, weight)
    assert torch.equal(weight.main_grad, before[0])
    assert (weight.grad, weight.grad_added_to_main_grad) == (None, False)


def test_gradients_that_somebody_asks_for_are_right_when_nothing_is_fused(make_compiled, assert_close):
    layer = make_compiled("linear")
    layer.attach(False)
    x, dy = layer.batch(1)
    grads = torch.autograd.grad(layer(x, accumulate_wgrad="off"), layer.params, dy)
    assert_close(grads, layer.wgrads())
    assert layer.grads() == [None]


def test_experts_of_a_compiled_layer_accumulate_in_one_dtype_and_layout():
    def enter(weights, targets):
        compiled.enter_forward(torch.zeros(3, dtype=torch.int32), weights, targets, "weight", [2], True)

    weights = [torch.nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16)) for _ in range(2)]
    targets = [torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.bfloat16)]
    for weight, target in zip(weights, targets, strict=True):
        weight.main_grad = target
    with pytest.raises(ValueError, match="weight: expected all experts to accumulate in one dtype"):
        enter(weights, targets)
    targets = [torch.zeros(3, 4), torch.zeros(4, 3).T]
    for weight, target in zip(weights, targets, strict=True):
        weight.main_grad = target
    with pytest.raises(ValueError, match=r"weight\[1\]: expected a gradient with the strides of expert 0's"):
        enter(weights, targets)
