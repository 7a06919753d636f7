"""float32 experts in 16 bits, by `recipe=` or autocast: results of 16-bit experts, and unrounded weight gradients."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.eight_bit_layer import SMALL, Layer
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fusedmlp
from bench.oracle import reference
from fusedmlp.operators import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("torch", "triton")
COUNTS, ROWS, H, F = (SMALL[name] for name in ("counts", "rows", "H", "F"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Sums in float32 differ from float64 by this part of the sum of magnitudes, whatever the order of at most 34 products.
ROUNDING = 34 * 2.0**-24
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
]


def make(x_dtype=torch.float32, **options):
    """float32 experts and a batch; x and dy may be of another dtype."""
    layer = Layer(**SMALL | {"device": DEVICE} | options)
    layer.x, layer.dy = layer.x.to(x_dtype), layer.dy.to(x_dtype)
    return layer


def cast(layer, dtype):
    """The same layer with weights, biases, x and dy in 16 bits."""
    other = copy.deepcopy(layer)
    other.params = [[Parameter(p.detach().to(dtype)) for p in group] for group in layer.params]
    other.biases = [bias if bias is None else Parameter(bias.detach().to(dtype)) for bias in layer.biases]
    other.x, other.dy = layer.x.to(dtype), layer.dy.to(dtype)
    return other


def grads(layer, attribute="grad"):
    return [torch.cat([getattr(p, attribute).view(-1, *p.shape[-2:]) for p in group]) for group in layer.params]


def operands_of(layer, impl):
    """`(dy, x)` of the weight gradients of fc2 and fc1, from a layer in 16 bits."""
    queue, seen = fusedmlp.WgradQueue(), []
    layer(impl=impl, wgrad_queue=queue).backward(layer.dy)
    seen = [delayed.operands for delayed in queue._pending]
    queue.clear()
    return [(one.dy, one.x) for one in seen]


def exact_wgrads(layer, dtype, impl):
    """Gradients of fc1 and fc2, float64 sums over 16-bit operands, and the sums of magnitudes."""
    results = []
    for dy, x in reversed(operands_of(cast(layer, dtype), impl)):
        products = [reference.wgrad(f(dy.double()), f(x.double()), COUNTS) for f in (lambda t: t, torch.abs)]
        results.append([p.mT if layer.layout == "in_out" else p for p in products])
    return results


def assert_unrounded(got, expected):
    for wgrad, (exact, magnitude) in zip(got, expected, strict=True):
        assert wgrad.dtype == torch.float32
        assert ((wgrad.double() - exact).abs() <= ROUNDING * magnitude).all()
        rounded = exact.bfloat16().double()
        assert ((rounded - exact).abs() > ROUNDING * magnitude).any()  # a rounded wgrad would not have passed


CALLS = {
    "autocast": lambda name: ({}, torch.autocast(DEVICE, DTYPES[name])),
    "recipe": lambda name: ({"recipe": name}, nullcontext()),
    "recipe under another autocast": lambda name: (
        {"recipe": name},
        torch.autocast(DEVICE, DTYPES["fp16" if name == "bf16" else "bf16"]),
    ),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", DTYPES)
def test_wgrad_is_not_rounded(recipe, call, impl):
    layer = make()
    options, context = CALLS[call](recipe)
    with context:
        y = layer(impl=impl, **options)
    y.backward(layer.dy)
    assert_unrounded(grads(layer), exact_wgrads(layer, DTYPES[recipe], impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("recipe", DTYPES)
@pytest.mark.parametrize("x_is", ["float32", "16 bits"])
@pytest.mark.parametrize("packed", [True, False])
def test_computes_as_16_bit_experts_do(packed, x_is, recipe, impl):
    """y, and the gradients of x, probs and biases, equal those of a layer of 16-bit weights bit for bit."""
    dtype = DTYPES[recipe]
    layer = make(torch.float32 if x_is == "float32" else dtype, packed=packed, bias=True)
    narrow, results = cast(layer, dtype), []
    for each, options in ((layer, {"recipe": recipe}), (narrow, {})):
        x, each.probs = each.x.clone().requires_grad_(), each.probs.clone().requires_grad_()
        y = each(x, impl=impl, **options)
        assert y.dtype == each.x.dtype
        y.backward(each.dy)
        assert x.grad.dtype == each.x.dtype
        results.append([y, x.grad, each.probs.grad, *(bias.grad for bias in each.biases)])
    for wide, small in zip(*results, strict=True):
        assert torch.equal(wide.to(small.dtype), small)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("mode", ["main_grad", "grad", "off"])
def test_every_mode_and_layout(mode, delayed, layout, packed):
    layer = make(packed=packed, layout=layout)
    place = "main_grad" if mode == "main_grad" else "grad"
    for group in layer.params:
        for param in group:
            start = torch.full_like(param, 0.5)
            if mode == "main_grad":
                param.main_grad = start
            elif mode == "grad":
                param.grad = start
    queue = fusedmlp.WgradQueue() if delayed else None
    layer(recipe="bf16", accumulate_wgrad=mode, wgrad_queue=queue).backward(layer.dy)
    if queue is not None:
        assert len(queue) == 2
        queue.run()
    start = 0.0 if mode == "off" else 0.5
    expected = [(exact + start, size + start) for exact, size in exact_wgrads(layer, torch.bfloat16, "torch")]
    assert_unrounded(grads(layer, place), expected)


def test_16_bit_weights_with_a_recipe_add_unrounded_to_main_grad():
    layer, exact = cast(make(), torch.bfloat16), exact_wgrads(make(), torch.bfloat16, "torch")
    buffer = fusedmlp.MainGradBuffer([p for group in layer.params for p in group])
    layer(recipe="bf16").backward(layer.dy)
    assert_unrounded(grads(layer, "main_grad"), exact)
    buffer.zero_grad()
    layer().backward(layer.dy)  # rounds, as it says
    with pytest.raises(AssertionError):
        assert_unrounded(grads(layer, "main_grad"), exact)


@pytest.mark.parametrize("impl", IMPLS)
def test_moe_experts_and_grouped_linear(impl):
    layer, dtype = make(), torch.bfloat16
    fc1, fc2 = (group[0] for group in layer.params)
    x = layer.x[: sum(COUNTS)]
    top_k = torch.rand(len(x), len(COUNTS), device=DEVICE).argsort(1)[:, :2]
    weights, dy = torch.rand(top_k.shape, device=DEVICE), layer.dy[: len(x)]
    y = fusedmlp.moe_experts(x, top_k, weights, fc1, fc2, recipe="bf16", impl=impl)
    y.backward(dy)
    narrow = [Parameter(w.detach().to(dtype)) for w in (fc1, fc2)]
    small = fusedmlp.moe_experts(x.to(dtype), top_k, weights, *narrow, impl=impl)
    assert y.dtype == x.dtype
    assert torch.equal(y, small.float())
    small.backward(dy.to(dtype))
    for wide, rounded in zip((fc1, fc2), narrow, strict=True):
        torch.testing.assert_close(wide.grad, rounded.grad.float(), rtol=2**-7, atol=1e-3)
    w = Parameter(fc1.detach().clone())
    y = fusedmlp.grouped_linear(x, w, COUNTS, recipe="bf16", impl=impl)
    y.sum().backward()
    assert y.dtype == w.grad.dtype == torch.float32
    ones, halved = torch.ones(len(x), 2 * F, device=DEVICE), x.to(dtype).float()
    torch.testing.assert_close(
        w.grad.double(), reference.wgrad(ones.double(), halved.double(), COUNTS), rtol=1e-6, atol=1e-5
    )


def test_modules_take_a_recipe():
    layer = make()
    module = fusedmlp.GroupedMLP(len(COUNTS), H, F, recipe="bf16")
    assert {module.fc1.recipe, module.fc2.recipe} == {"bf16"}
    for fc, (weight,) in zip((module.fc1, module.fc2), layer.params, strict=True):
        fc.weight.data.copy_(weight)
    x = torch.nan_to_num(layer.x)
    assert torch.equal(module(x, COUNTS, layer.probs), layer(x, recipe="bf16"))
    assert torch.equal(module.fc1(x, COUNTS), fusedmlp.grouped_linear(x, layer.params[0][0], COUNTS, recipe="bf16"))
    assert not torch.equal(module(x, COUNTS, layer.probs), layer(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    layer, plain = make(), make()
    for each, run in ((plain, lambda f, x: f(x)), (layer, lambda f, x: checkpoint(f, x, use_reentrant=reentrant))):
        x = each.x.clone().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            y = run(each, x)
        y.backward(each.dy)
    for got, want in zip(grads(layer), grads(plain), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("call", ["autocast", "recipe"])
def test_compiled(call, attached, packed):
    compiled, eager = make(packed=packed), make(packed=packed)
    for layer in (compiled, eager):
        if attached:
            fusedmlp.MainGradBuffer([p for group in layer.params for p in group])
    run = torch.compile(lambda x, **o: compiled(x, **o), backend="aot_eager", fullgraph=True)
    x, y = torch.nan_to_num(compiled.x), []
    for layer in (compiled, eager):
        options, context = CALLS[call]("bf16")
        with context:
            y.append((run if layer is compiled else layer)(x, **options))
        y[-1].backward(layer.dy)
    assert torch.equal(*y)
    place = "main_grad" if attached else "grad"
    for got, want in zip(grads(compiled, place), grads(eager, place), strict=True):
        assert torch.equal(got, want)


def test_exported_program():
    """It holds operators alone, which return weight gradients in 16 bits; autograd casts them."""
    module = fusedmlp.GroupedMLP(len(COUNTS), H, F, recipe="bf16")
    x, counts = torch.randn(ROWS, H), torch.tensor(COUNTS)
    program = torch.export.export(module, (x, counts)).module()
    results = []
    for run in (program, module):
        y = run(x, counts)
        results.append([y, *torch.autograd.grad(y.sum(), [*module.parameters()])])
    assert torch.equal(results[0][0], results[1][0])
    for got, exact in zip(*results, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, exact.bfloat16().float())


def test_errors():
    layer = make()
    with pytest.raises(ValueError, match=r"recipe: expected one of 'bf16', 'fp16', 'fp8_block', 'mxfp8'; got 'fp8'"):
        layer(recipe="fp8")
    with pytest.raises(TypeError, match=r"x: expected dtype torch.bfloat16 or torch.float32 .*; got torch.float16"):
        layer(layer.x.half(), recipe="bf16")
    with pytest.raises(TypeError, match=r"fc1_weight: expected dtype torch.bfloat16, that of x .*; got torch.float32"):
        layer(layer.x.bfloat16())
    with pytest.raises(TypeError, match=r"fc1_weight: expected dtype torch.bfloat16 or .*; got torch.float16"):
        cast(layer, torch.float16)(layer.x, recipe="bf16")
    mixed = make(packed=False)
    mixed.params[0][2] = Parameter(mixed.params[0][2].detach().bfloat16())
    with pytest.raises(TypeError, match=r"fc1_weight\[2\]: expected dtype torch.float32, that of fc1_weight\[0\]"):
        mixed(recipe="bf16")
    with (
        torch.autocast(DEVICE, torch.float16),
        pytest.raises(TypeError, match=r"fc1_weight: expected dtype torch\.bfloat16"),
    ):
        layer(layer.x.bfloat16())  # of another autocast


def test_operators_derivatives_take_no_part():
    """`torch.ops.fusedmlp` casts nothing: operands have one dtype there."""
    x, w, offsets = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([0, 2, 4], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.grouped_gemm(x, [w], [], offsets, "", False, "torch").dtype == torch.float32
