"""float32 experts in 16 bits, by `recipe=` or autocast: results of 16-bit experts, and unrounded weight gradients."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.compiler import in_graphs
from support.weight_changes import in_place, moved, through_data, unseen
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fusedmlp
from bench.oracle import reference
from fusedmlp.autograd import weight_copies
from fusedmlp.operators import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("torch", "triton")
COUNTS, ROWS, H, F = (19, 0, 1, 34), 57, 24, 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Sums in float32 differ from float64 by this part of the sum of magnitudes, whatever the order of at most 34 products.
ROUNDING = 34 * 2.0**-24
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
]


class Layer:
    """float32 experts and a batch: x, dy and the bias in float32, padding rows of NaN."""

    def __init__(self, packed=True, bias=False, layout="out_in", x_dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE)

        shapes = [(len(COUNTS), 2 * F, H), (len(COUNTS), H, F)]
        weights = [normal(*shape) / shape[2] ** 0.5 for shape in shapes]
        self.layout = layout
        if layout == "in_out":
            weights = [w.mT.contiguous() for w in weights]
        self.params = [[Parameter(w)] if packed else [Parameter(one.clone()) for one in w] for w in weights]
        # Numbers that 16 bits hold.
        self.biases = [Parameter(normal(*shape[:2]).mul(8).round() / 8) for shape in shapes] if bias else [None, None]
        self.x, self.dy = normal(ROWS, H), normal(ROWS, H)
        self.x[sum(COUNTS) :] = float("nan")
        self.x, self.dy = self.x.to(x_dtype), self.dy.to(x_dtype)
        self.probs = torch.rand(ROWS, generator=generator).to(DEVICE)
        self.packed = packed

    def __call__(self, x=None, **options):
        weights = [group[0] if self.packed else group for group in self.params]
        biases = dict(zip(("fc1_bias", "fc2_bias"), self.biases, strict=True))
        counts = torch.tensor(COUNTS, device=DEVICE)
        x = self.x if x is None else x
        return fusedmlp.grouped_mlp(
            x, *weights, counts, probs=self.probs, weight_layout=self.layout, **biases, **options
        )

    def cast(self, dtype):
        """The same layer with weights, x and dy in 16 bits."""
        other = copy.deepcopy(self)
        other.params = [[Parameter(p.detach().to(dtype)) for p in group] for group in self.params]
        other.biases = [bias if bias is None else Parameter(bias.detach().to(dtype)) for bias in self.biases]
        other.x, other.dy = self.x.to(dtype), self.dy.to(dtype)
        return other

    def grads(self, attribute="grad"):
        return [torch.cat([getattr(p, attribute).view(-1, *p.shape[-2:]) for p in group]) for group in self.params]


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
    for dy, x in reversed(operands_of(layer.cast(dtype), impl)):
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
    layer = Layer()
    options, context = CALLS[call](recipe)
    with context:
        y = layer(impl=impl, **options)
    y.backward(layer.dy)
    assert_unrounded(layer.grads(), exact_wgrads(layer, DTYPES[recipe], impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("recipe", DTYPES)
@pytest.mark.parametrize("x_is", ["float32", "16 bits"])
@pytest.mark.parametrize("packed", [True, False])
def test_computes_as_16_bit_experts_do(packed, x_is, recipe, impl):
    """y, and the gradients of x, probs and biases, equal those of a layer of 16-bit weights bit for bit."""
    dtype = DTYPES[recipe]
    layer = Layer(packed, bias=True, x_dtype=torch.float32 if x_is == "float32" else dtype)
    narrow, results = layer.cast(dtype), []
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
    layer = Layer(packed, layout=layout)
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
    assert_unrounded(layer.grads(place), expected)


def test_16_bit_weights_with_a_recipe_add_unrounded_to_main_grad():
    layer, exact = Layer().cast(torch.bfloat16), exact_wgrads(Layer(), torch.bfloat16, "torch")
    buffer = fusedmlp.MainGradBuffer([p for group in layer.params for p in group])
    layer(recipe="bf16").backward(layer.dy)
    assert_unrounded(layer.grads("main_grad"), exact)
    buffer.zero_grad()
    layer().backward(layer.dy)  # rounds, as it says
    with pytest.raises(AssertionError):
        assert_unrounded(layer.grads("main_grad"), exact)


@pytest.mark.parametrize("impl", IMPLS)
def test_moe_experts_and_grouped_linear(impl):
    layer, dtype = Layer(), torch.bfloat16
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
    layer = Layer()
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
    layer, plain = Layer(), Layer()
    for each, run in ((plain, lambda f, x: f(x)), (layer, lambda f, x: checkpoint(f, x, use_reentrant=reentrant))):
        x = each.x.clone().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            y = run(each, x)
        y.backward(each.dy)
    for got, want in zip(layer.grads(), plain.grads(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("call", ["autocast", "recipe"])
def test_compiled(call, attached, packed):
    compiled, eager = Layer(packed), Layer(packed)
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
    for got, want in zip(compiled.grads(place), eager.grads(place), strict=True):
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


@pytest.fixture
def casts(monkeypatch):
    """Numbers of experts' tensors that were cast, one for each copy."""
    made, original = [], weight_copies.packed
    monkeypatch.setattr(weight_copies, "packed", lambda w, dtype: (made.append(len(w)), original(w, dtype))[1])
    return made


def weights(layer):
    return [group[0] if layer.packed else group for group in layer.params]


def copies(layer, recipe):
    return fusedmlp.quantize_weights(*weights(layer), recipe, weight_layout=layer.layout)


def results(layer, call=None, **options):
    """y, and the gradients of x, probs and weights, of one forward and backward."""
    x, layer.probs = layer.x.clone().requires_grad_(), layer.probs.detach().clone().requires_grad_()
    y = (call or layer)(x, **options)
    y.backward(layer.dy)
    return [y.detach(), x.grad, layer.probs.grad, *layer.grads()]


def assert_same(got, want):
    for mine, right in zip(got, want, strict=True):
        assert mine.dtype == right.dtype
        assert torch.equal(mine, right)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("recipe", DTYPES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("packed", [True, False])
def test_copies_give_the_bits_of_a_layer_that_casts(packed, layout, recipe, impl, casts):
    fresh, kept = Layer(packed, layout=layout), Layer(packed, layout=layout)
    options = {"recipe": recipe, "impl": impl}
    want = results(fresh, **options)
    assert len(casts) == 4  # both weights, in forward and in backward
    casts.clear()
    held = copies(kept, recipe)
    assert casts == [1 if packed else len(COUNTS)] * 2
    (fc1,), (fc2,) = held.fc1, held.fc2
    assert fc1.shape == (len(COUNTS), 2 * F, H)
    assert fc2.shape == (len(COUNTS), H, F)
    assert fc1.dtype == fc2.dtype == DTYPES[recipe]
    assert not fc1.requires_grad
    assert not fc2.requires_grad
    assert_same(results(kept, quantized_weights=held, **options), want)
    assert len(casts) == 2


@pytest.mark.parametrize("x_is", ["float32", "16 bits"])
@pytest.mark.parametrize("recipe", DTYPES)
def test_a_list_of_one_expert_has_a_packed_copy(recipe, x_is):
    x = torch.randn(9, H, device=DEVICE).to(torch.float32 if x_is == "float32" else DTYPES[recipe])
    fc1, fc2 = (torch.randn(*shape, device=DEVICE).requires_grad_() for shape in ((2 * F, H), (H, F)))
    held, found = fusedmlp.quantize_weights([fc1], [fc2], recipe), []
    for given in (held, None):
        y = fusedmlp.grouped_mlp(x, [fc1], [fc2], [9], recipe=recipe, quantized_weights=given)
        assert y.dtype == x.dtype
        found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [fc1, fc2])])
    assert held.fc1[0].shape == (1, 2 * F, H)
    assert_same(*found)


@pytest.mark.parametrize("packed", [True, False])
def test_weights_are_cast_once_for_the_micro_batches_of_a_step(packed, casts):
    kept, plain = Layer(packed), Layer(packed)
    buffers = [fusedmlp.MainGradBuffer([p for group in layer.params for p in group]) for layer in (kept, plain)]
    for _ in range(2):
        for layer, buffer in zip((kept, plain), buffers, strict=True):
            buffer.zero_grad()
            casts.clear()
            held = copies(layer, "bf16") if layer is kept else None
            for factor in (1, -2, 3):
                layer(layer.x * factor, recipe="bf16", quantized_weights=held).backward(layer.dy)
            # Otherwise both weights in each forward, and fc2 in its backward, as x needs no gradient.
            assert len(casts) == (2 if layer is kept else 3 * 3)
        assert_same(kept.grads("main_grad"), plain.grads("main_grad"))
        with torch.no_grad():
            for param in [p for layer in (kept, plain) for group in layer.params for p in group]:
                param.sub_(param.main_grad)


@pytest.mark.parametrize("change", [unseen, through_data, in_place, moved])
def test_a_call_without_copies_multiplies_weights_as_they_are(change):
    layer, x = Layer(), torch.nan_to_num(Layer().x)
    for _ in range(2):
        before = layer(x, recipe="bf16")
        change(layer.params[1][0])
        assert torch.equal(layer(x, recipe="bf16"), 2 * before)  # fc2 is doubled


@pytest.mark.parametrize("change", [in_place, moved])
@pytest.mark.parametrize("packed", [True, False])
def test_copies_of_weights_that_were_written_are_refused(packed, change):
    layer, x = Layer(packed), torch.nan_to_num(Layer().x)
    held = copies(layer, "bf16")
    before = layer(x, recipe="bf16", quantized_weights=held)
    for weight in layer.params[1]:
        change(weight)
        with pytest.raises(RuntimeError, match=r"expected copies of these weights as they are; .* \(call quan"):
            layer(x, recipe="bf16", quantized_weights=held)
    assert torch.equal(layer(x, recipe="bf16", quantized_weights=copies(layer, "bf16")), 2 * before)


def test_a_copy_that_was_written_is_refused_in_backward():
    layer = Layer()
    held = copies(layer, "bf16")
    y = layer(layer.x.clone().requires_grad_(), recipe="bf16", quantized_weights=held)
    held.fc2[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.dy)


def test_copies_of_other_weights_or_for_another_recipe_are_refused():
    layer = Layer()
    held = copies(layer, "bf16")
    with pytest.raises(RuntimeError, match="got copies of others"):
        Layer()(recipe="bf16", quantized_weights=held)
    with pytest.raises(RuntimeError, match="got copies of others"):
        layer.cast(torch.bfloat16)(recipe="bf16", quantized_weights=held)
    for recipe in ("fp16", None):
        with pytest.raises(ValueError, match=rf"expected recipe='bf16' and .*; got {recipe!r} and 'out_in'"):
            layer(recipe=recipe, quantized_weights=held)
    with (
        torch.autocast(DEVICE, torch.bfloat16),
        pytest.raises(ValueError, match=r"expected recipe='bf16' and .*; got None and 'out_in'"),
    ):
        layer(quantized_weights=held)
    square = [torch.randn(2, 16, 16, device=DEVICE) for _ in range(2)]
    options = {"recipe": "bf16", "activation": "gelu", "quantized_weights": fusedmlp.quantize_weights(*square, "bf16")}
    x = torch.randn(5, 16, device=DEVICE)
    assert fusedmlp.grouped_mlp(x, *square, [2, 3], **options).any()
    with pytest.raises(ValueError, match=r"weight_layout='out_in', as they were made with; got 'bf16' and 'in_out'"):
        fusedmlp.grouped_mlp(x, *square, [2, 3], weight_layout="in_out", **options)
    other = [torch.randn(4, 3, H, device=DEVICE), torch.randn(4, H, 3, device=DEVICE)]
    with pytest.raises(ValueError, match=r"copies of fc1_weight, shape \(4, 32, 24\) on .*; got shape \(4, 3, 24\) on"):
        layer(recipe="bf16", quantized_weights=fusedmlp.quantize_weights(*other, "bf16"))


@pytest.mark.parametrize("recipe", DTYPES)
def test_only_float32_weights_have_copies_in_16_bits(recipe):
    for dtype in DTYPES.values():
        narrow = weights(Layer().cast(dtype))
        with pytest.raises(TypeError, match=rf"fc1_weight: expected dtype torch\.float32.*; got {dtype}"):
            fusedmlp.quantize_weights(*narrow, recipe)
        with pytest.raises(TypeError, match=rf"fc2_weight: expected dtype torch\.float32.*; got {dtype}"):
            fusedmlp.quantize_weights(weights(Layer())[0], narrow[1], recipe)


@pytest.mark.parametrize("where", ["no_grad", "inference", "inference of inference tensors"])
def test_copies_without_gradients(where, casts):
    layer, x = Layer(), torch.nan_to_num(Layer().x)
    with torch.no_grad():
        want = layer(x, recipe="fp16")
    casts.clear()
    with torch.no_grad() if where == "no_grad" else torch.inference_mode():
        params = [w.clone() for w in weights(layer)] if where.endswith("tensors") else weights(layer)
        held = fusedmlp.quantize_weights(*params, "fp16")
        options = {"recipe": "fp16", "quantized_weights": held, "probs": layer.probs}
        counts = torch.tensor(COUNTS, device=DEVICE)
        for _ in range(2):
            assert torch.equal(fusedmlp.grouped_mlp(x, *params, counts, **options), want)
    assert len(casts) == 2


@pytest.mark.parametrize("how", ["checkpoint", "reentrant checkpoint", "delayed"])
def test_copies_in_checkpoints_and_with_a_queue(how):
    layer, queue = Layer(packed=False), fusedmlp.WgradQueue() if how == "delayed" else None
    options = {"recipe": "bf16", "quantized_weights": copies(layer, "bf16"), "wgrad_queue": queue}

    def call(x, **_):
        if queue is not None:
            return layer(x, **options)
        return checkpoint(lambda x: layer(x, **options), x, use_reentrant=how.startswith("reentrant"))

    want, found = results(Layer(packed=False), recipe="bf16"), None
    x, layer.probs = layer.x.clone().requires_grad_(), layer.probs.requires_grad_()
    y = call(x)
    y.backward(layer.dy)
    if queue is not None:
        queue.run()
    found = [y.detach(), x.grad, layer.probs.grad, *layer.grads()]
    assert_same(found, want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [True, False])
def test_copies_with_tokens(packed, impl):
    layer, generator = Layer(packed), torch.Generator().manual_seed(0)
    x, dy = (torch.randn(20, H, generator=generator).to(DEVICE) for _ in range(2))
    index = torch.rand(20, len(COUNTS), generator=generator).topk(2).indices.to(DEVICE)
    top_k_weights = torch.rand(20, 2, generator=generator).to(DEVICE)
    found = []
    for held in (copies(layer, "bf16"), None):
        given = x.clone().requires_grad_()
        options = {"recipe": "bf16", "impl": impl, "quantized_weights": held}
        y = fusedmlp.moe_experts(given, index, top_k_weights, *weights(layer), **options)
        params = [p for group in layer.params for p in group]
        found.append([y.detach(), *torch.autograd.grad(y, [given, *params], dy)])
    assert_same(*found)


@in_graphs
@pytest.mark.slow
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("packed", [True, False])
def test_compiled_with_copies(packed, layout, attached, casts):
    """Copies are inputs of the graph: it takes those of the next step."""
    torch._dynamo.reset()
    layers = [Layer(packed, layout=layout) for _ in range(2)]
    compiled, eager = layers
    if attached:
        for layer in layers:
            fusedmlp.MainGradBuffer([p for group in layer.params for p in group])
    run = torch.compile(lambda x, **o: compiled(x, **o), backend="aot_eager", fullgraph=True)
    x, place, ys = torch.nan_to_num(compiled.x), "main_grad" if attached else "grad", []
    for _ in range(2):
        held = copies(compiled, "bf16")
        casts.clear()
        given = [x.clone().requires_grad_() for _ in layers]
        ys = [run(given[0], recipe="bf16", quantized_weights=held)]
        ys[0].backward(compiled.dy)
        assert not casts
        ys.append(eager(given[1], recipe="bf16"))
        ys[1].backward(eager.dy)
        assert_same([ys[0], given[0].grad, *compiled.grads(place)], [ys[1], given[1].grad, *eager.grads(place)])
        with torch.no_grad():
            for param in [p for layer in layers for group in layer.params for p in group]:
                param.mul_(1.5)


def test_errors():
    layer = Layer()
    with pytest.raises(ValueError, match=r"recipe: expected one of 'bf16', 'fp16', 'fp8_block', 'mxfp8'; got 'fp8'"):
        layer(recipe="fp8")
    with pytest.raises(TypeError, match=r"x: expected dtype torch.bfloat16 or torch.float32 .*; got torch.float16"):
        layer(layer.x.half(), recipe="bf16")
    with pytest.raises(TypeError, match=r"fc1_weight: expected dtype torch.bfloat16, that of x .*; got torch.float32"):
        layer(layer.x.bfloat16())
    with pytest.raises(TypeError, match=r"fc1_weight: expected dtype torch.bfloat16 or .*; got torch.float16"):
        layer.cast(torch.float16)(layer.x, recipe="bf16")
    mixed = Layer(packed=False)
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
        assert ops.grouped_gemm(x, [w], [], offsets, "", "torch").dtype == torch.float32
