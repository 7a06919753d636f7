"""Copies of weights that outlive a call, in 8 bits and, of float32 weights, in 16."""

from contextlib import nullcontext

import pytest
import torch
from support.compiler import in_graphs
from support.eight_bit_layer import LAYERS, SMALL, F, H, Layer
from support.weight_changes import in_place, moved, through_data, unseen
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.autograd import weight_copies
from fusedmlp.kernels.operands import quantized
from fusedmlp.operators import ops, torch_products, torch_quantize
from fusedmlp.recipe import BLOCKS, DTYPES

SIXTEEN_BITS = ("bf16", "fp16")
RECIPES = pytest.mark.parametrize("recipe", [*BLOCKS, *SIXTEEN_BITS])
EIGHT_BITS = pytest.mark.parametrize("recipe", BLOCKS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("torch", "triton")
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
]


@pytest.fixture
def made(monkeypatch):
    """The weight of every copy that is made, in a layer or by `quantize_weights`."""
    found = []
    for module, name in ((ops, "quantize_weights"), (weight_copies, "packed")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda w, *a, original=original: (found.append(w), original(w, *a))[1])
    return found


def layer_for(recipe, **options):
    return Layer(**options) if recipe in BLOCKS else Layer(**SMALL | {"device": DEVICE} | options)


def alike(got, want, recipe):
    """The same bits. In 8 bits, the same operands were multiplied, in fp32: a copy lies in another layout, of which
    some CPUs' GEMMs sum in another order, and then a 16-bit result may round to its neighbour.
    """
    if recipe in SIXTEEN_BITS:
        assert torch.equal(got, want)
    else:
        got, want = got.double(), want.double()
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-18 * want.abs().max().item())


def same(got, want, recipe):
    assert got.keys() == want.keys()
    for name, t in got.items():
        alike(t, want[name], recipe)


@EIGHT_BITS
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_results_are_those_of_a_layer_that_quantizes(kind, wgrad, recipe, made, monkeypatch):
    fresh, given = (Layer(**LAYERS[kind]) for _ in range(2))
    want = fresh.results(recipe=recipe, wgrad=wgrad)
    made.clear()
    monkeypatch.delattr(torch_products, "rounded_weights")  # which quantizes for one product
    same(given.results(recipe=recipe, wgrad=wgrad, quantized_weights=given.copies(recipe)), want, recipe)
    assert len(made) == 2


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("recipe", SIXTEEN_BITS)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("packed", [True, False])
def test_results_are_those_of_a_layer_that_casts(packed, layout, recipe, impl, made):
    fresh, kept = (layer_for(recipe, packed=packed, layout=layout) for _ in range(2))
    want = fresh.results(recipe=recipe, impl=impl)
    assert len(made) == 4  # both weights, in forward and in backward
    made.clear()
    held = kept.copies(recipe)
    assert [len(w) for w in made] == [1 if packed else len(kept.counts)] * 2
    for (copy,), logical in zip((held.fc1, held.fc2), kept.logical, strict=True):
        assert (copy.shape, copy.dtype, copy.requires_grad) == (logical.shape, DTYPES[recipe], False)
    same(kept.results(recipe=recipe, impl=impl, quantized_weights=held), want, recipe)
    assert len(made) == 2


@pytest.mark.parametrize("x_is", ["float32", "16 bits"])
@pytest.mark.parametrize("recipe", SIXTEEN_BITS)
def test_a_list_of_one_expert_has_a_packed_copy(recipe, x_is):
    torch.manual_seed(0)  # of large values, gradients overflow fp16
    x = torch.randn(9, 24, device=DEVICE).to(torch.float32 if x_is == "float32" else DTYPES[recipe])
    fc1, fc2 = (torch.randn(*shape, device=DEVICE).requires_grad_() for shape in ((32, 24), (24, 16)))
    held, found = fusedmlp.quantize_weights([fc1], [fc2], recipe), []
    for given in (held, None):
        y = fusedmlp.grouped_mlp(x, [fc1], [fc2], [9], recipe=recipe, quantized_weights=given)
        assert y.dtype == x.dtype
        found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [fc1, fc2])])
    assert held.fc1[0].shape == (1, 32, 24)
    assert all(map(torch.equal, *found))


@EIGHT_BITS
@pytest.mark.parametrize("packed", [True, False])
def test_layout_is_that_of_kernels(packed, recipe):
    """Scales of every block, by the layout that kernels/operands/quantized.py describes."""
    generator = torch.Generator().manual_seed(0)
    E, N, K = (2, 256, 384) if recipe == "fp8_block" else (2, 160, 288)
    w = torch.randn(E, N, K, generator=generator) * 2.0 ** -torch.randint(9, (E, N, K), generator=generator)
    got = ops.quantize_weights([w] if packed else [*w], recipe, "torch")
    size = BLOCKS[recipe]
    for elements, scales, lines in ((*got[:2], w.bfloat16()), (*got[2:], w.bfloat16().mT)):
        M, C = lines.shape[1:]
        assert elements.shape == lines.shape
        assert scales.shape == quantized.weight_scales_shape(E, M, C, recipe)
        for e, m, c in ((0, 0, 0), (1, 0, C - 1), (0, M - 1, 0), (1, M - 1, C - 1), (1, 37, 101), (0, 128, 140)):
            if recipe == "fp8_block":
                scale = scales[e, m // 128, c // 128]
                block = lines[e, m // 128 * 128 :, c // 128 * 128 :][:128, :128]
            else:
                byte = scales[e, c // 128, m // 128, m % 32, m % 128 // 32, c % 128 // 32]
                scale = torch.ldexp(torch.tensor(1.0), byte.int() - 127)
                block = lines[e, m, c // size * size :][:size]
            amax = block.abs().max().float()
            assert 224 < amax / scale <= 448
            assert (elements[e, m, c].float() * scale - lines[e, m, c]).abs() <= amax / 16


@EIGHT_BITS
def test_float32_is_rounded_to_bfloat16_first(recipe):
    w = torch.randn(1, 128, 256, generator=torch.Generator().manual_seed(0))
    got, rounded = (ops.quantize_weights([t], recipe, "torch") for t in (w, w.bfloat16()))
    for mine, right in zip(got, rounded, strict=True):
        assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8))
    block = (128, 128) if recipe == "fp8_block" else (1, 32)
    assert not torch.equal(got[0].float(), torch_quantize.quantize(w, recipe, block).elements.float())


def test_past_the_ends_are_scales_of_zeros():
    by_in = ops.quantize_weights([torch.ones(1, 32, 32)], "mxfp8", "torch")[1]
    assert by_in[0, 0, 0, :, 0, 0].all()
    assert by_in.count_nonzero() == 32


@RECIPES
@pytest.mark.parametrize("packed", [True, False])
def test_copies_are_made_once_for_the_micro_batches_of_a_step(packed, recipe, made):
    kept, fresh = (layer_for(recipe, packed=packed) for _ in range(2))
    every = [[param for group in layer.params for param in group] for layer in (kept, fresh)]
    buffers = [fusedmlp.MainGradBuffer(params) for params in every]
    # In 16 bits without copies: both weights in each forward, and fc2 in its backward, as x needs no gradient.
    without = 0 if recipe in BLOCKS else 3 * 3
    for _ in range(2):
        for layer, buffer in zip((kept, fresh), buffers, strict=True):
            buffer.zero_grad()
            made.clear()
            held = kept.copies(recipe) if layer is kept else None
            for factor in (1, -2, 3):
                layer(layer.x * factor, recipe=recipe, quantized_weights=held).backward(layer.dy)
            assert len(made) == (2 if layer is kept else without)
        for mine, other in zip(*every, strict=True):
            alike(mine.main_grad, other.main_grad, recipe)
            with torch.no_grad():
                for param in (mine, other):
                    param.sub_(mine.main_grad, alpha=0.01)


@pytest.mark.parametrize("change", [unseen, through_data, in_place, moved])
@RECIPES
def test_a_call_without_copies_multiplies_weights_as_they_are(recipe, change):
    layer = layer_for(recipe)
    for _ in range(2):
        before = layer(recipe=recipe)
        assert before.any()
        change(layer.params[1][0])
        assert torch.equal(layer(recipe=recipe), 2 * before)  # fc2 is doubled


@pytest.mark.parametrize("change", [in_place, moved])
@pytest.mark.parametrize("packed", [True, False])
@RECIPES
def test_copies_of_weights_that_were_written_are_refused(recipe, packed, change):
    layer = layer_for(recipe, packed=packed)
    held = layer.copies(recipe)
    before = layer(recipe=recipe, quantized_weights=held)
    for weight in layer.params[1]:
        change(weight)
        with pytest.raises(
            RuntimeError, match=r"expected copies of these weights as they are; .* \(call quantize_weights"
        ):
            layer(recipe=recipe, quantized_weights=held)
    assert torch.equal(layer(recipe=recipe, quantized_weights=layer.copies(recipe)), 2 * before)


def test_a_copy_that_was_written_is_refused_in_backward():
    layer = layer_for("bf16")
    held = layer.copies("bf16")
    y = layer(layer.x.clone().requires_grad_(), recipe="bf16", quantized_weights=held)
    held.fc2[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.dy)


@RECIPES
def test_copies_of_other_weights_or_for_another_call_are_refused(recipe):
    layer = layer_for(recipe)
    held, others = layer.copies(recipe), layer_for(recipe).copies(recipe)
    with pytest.raises(RuntimeError, match="got copies of others"):
        layer(recipe=recipe, quantized_weights=others)
    other_recipe = {"bf16": "fp16", "fp16": "bf16", "mxfp8": "fp8_block", "fp8_block": "mxfp8"}[recipe]
    for given, context in (
        (other_recipe, nullcontext()),
        (None, nullcontext()),
        (None, torch.autocast(DEVICE, torch.bfloat16)),
    ):
        with (
            context,
            pytest.raises(ValueError, match=rf"expected recipe='{recipe}' and .*; got {given!r} and 'out_in'"),
        ):
            layer(recipe=given, quantized_weights=held)
    # Copies of weights that lie the other way, where sizes do not tell them apart.
    square = [torch.randn(2, 128, 128, device=DEVICE) for _ in range(2)]
    copies = fusedmlp.quantize_weights(*square, recipe)
    options = {"recipe": recipe, "activation": "gelu", "quantized_weights": copies}
    x = torch.randn(140, 128, device=DEVICE)
    assert fusedmlp.grouped_mlp(x, *square, [70, 70], **options).any()
    message = rf"weight_layout='out_in', as they were made with; got '{recipe}' and 'in_out'"
    with pytest.raises(ValueError, match=message):
        fusedmlp.grouped_mlp(x, *square, [70, 70], weight_layout="in_out", **options)
    E, N, K = layer.params[0][0].shape
    with pytest.raises(
        ValueError, match=rf"copies of fc1_weight, shape \({E}, {N}, {K}\) on .*; got shape \(2, 128, 128\) on"
    ):
        layer(recipe=recipe, quantized_weights=copies)


@pytest.mark.parametrize("recipe", SIXTEEN_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_float32_weights_have_copies_in_16_bits(dtype, recipe):
    fc1, fc2 = layer_for(recipe).weights
    layer = layer_for(recipe, dtype=dtype)
    message = rf"expected dtype torch\.float32.*; got {dtype}"
    with pytest.raises(TypeError, match=f"fc1_weight: {message}"):
        fusedmlp.quantize_weights(*layer.weights, recipe)
    with pytest.raises(TypeError, match=f"fc2_weight: {message}"):
        fusedmlp.quantize_weights(fc1, layer.weights[1], recipe)
    with pytest.raises(RuntimeError, match="got copies of others"):
        layer_for(recipe, dtype=DTYPES[recipe])(
            recipe=recipe, quantized_weights=fusedmlp.quantize_weights(fc1, fc2, recipe)
        )


@EIGHT_BITS
def test_few_rows_multiply_weights_in_16_bits(recipe, made):
    layer = Layer()
    x, few = torch.randn(9, H).bfloat16(), [3, 0, 2, 1, 3]
    want = fusedmlp.grouped_mlp(x, *layer.weights, few, recipe="bf16")
    got = fusedmlp.grouped_mlp(x, *layer.weights, few, recipe=recipe, quantized_weights=layer.copies(recipe))
    assert torch.equal(got, want)
    assert len(made) == 2


@pytest.mark.parametrize("where", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("weights", ["a layer's", "made there"])
@RECIPES
def test_without_gradients(recipe, weights, where, made):
    layer = layer_for(recipe)
    with torch.no_grad():
        want = layer(recipe=recipe)
    made.clear()
    with where():
        params = layer.weights if weights == "a layer's" else [w.clone() for w in layer.weights]
        held = fusedmlp.quantize_weights(*params, recipe)
        options = {"probs": layer.probs, "recipe": recipe, "quantized_weights": held}
        for _ in range(2):
            assert torch.equal(fusedmlp.grouped_mlp(layer.x, *params, layer.counts, **options), want)
    assert len(made) == 2


@pytest.mark.slow
@RECIPES
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", ["delayed", "checkpoint", "reentrant checkpoint"])
def test_in_checkpoints_and_with_a_queue(how, packed, recipe):
    class Checkpointed(Layer):
        def __call__(self, x, **options):
            call = super().__call__
            return checkpoint(lambda x: call(x, **options), x, use_reentrant=how.startswith("reentrant"))

    want = layer_for(recipe, packed=packed).results(recipe=recipe)
    layer, queue = layer_for(recipe, packed=packed), fusedmlp.WgradQueue() if how == "delayed" else None
    layer.__class__ = Layer if how == "delayed" else Checkpointed
    same(layer.results(recipe=recipe, quantized_weights=layer.copies(recipe), wgrad_queue=queue), want, recipe)


@in_graphs
@pytest.mark.slow
@RECIPES
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("packed", [True, False])
def test_compiled(packed, layout, attached, recipe, made):
    """Copies are inputs of the graph: it takes those of the next step."""
    torch._dynamo.reset()
    layers = [layer_for(recipe, packed=packed, layout=layout) for _ in range(2)]
    every = [[param for group in layer.params for param in group] for layer in layers]
    buffers = [fusedmlp.MainGradBuffer(params) for params in every] if attached else []
    run = torch.compile(Layer.__call__, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        results = []
        held = layers[0].copies(recipe)
        made.clear()
        for layer, call, copies in zip(layers, (run, Layer.__call__), (held, None), strict=True):
            x = torch.nan_to_num(layer.x).requires_grad_()
            y = call(layer, x, recipe=recipe, quantized_weights=copies)
            y.backward(torch.nan_to_num(layer.dy))
            assert not made or copies is None
            grads = [param.main_grad if attached else param.grad for group in layer.params for param in group]
            results.append(dict(enumerate([y, x.grad, *grads])))
        same(*results, recipe)
        with torch.no_grad():
            for param in every[0] + every[1]:
                param.mul_(1.5)
    del buffers  # kept until here


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [True, False])
@RECIPES
def test_tokens(recipe, packed, impl):
    layer, generator = layer_for(recipe, packed=packed), torch.Generator().manual_seed(0)
    tokens, width, experts = 200 if recipe in BLOCKS else 20, layer.x.shape[1], len(layer.counts)
    x, dy = (torch.randn(tokens, width, generator=generator).to(layer.x) for _ in range(2))
    index = torch.rand(tokens, experts, generator=generator).topk(2).indices.to(DEVICE)
    top_k_weights = torch.rand(tokens, 2, generator=generator).to(DEVICE)
    params, results = [param for group in layer.params for param in group], []
    options = {"recipe": recipe, "impl": impl if recipe in SIXTEEN_BITS else "torch"}
    for held in (layer.copies(recipe), None):
        given = x.clone().requires_grad_()
        y = fusedmlp.moe_experts(given, index, top_k_weights, *layer.weights, quantized_weights=held, **options)
        results.append(dict(enumerate([y.detach(), *torch.autograd.grad(y, [given, *params], dy)])))
    same(*results, recipe)


def test_errors():
    fc1, fc2 = Layer().weights
    held = fusedmlp.quantize_weights(fc1, fc2, "mxfp8")
    with pytest.raises(TypeError, match="quantized_weights: expected None or QuantizedWeights; got tuple"):
        Layer()(recipe="mxfp8", quantized_weights=(*held.fc1, *held.fc2))
    with pytest.raises(ValueError, match="recipe: expected one of 'bf16', 'fp16', 'fp8_block', 'mxfp8'; got 'fp8'"):
        fusedmlp.quantize_weights(fc1, fc2, "fp8")
    with pytest.raises(ValueError, match="weight_layout: expected one of 'out_in', 'in_out'; got 'rows'"):
        fusedmlp.quantize_weights(fc1, fc2, "mxfp8", weight_layout="rows")
    with pytest.raises(ValueError, match="fc2_weight: expected multiples of 128 features"):
        fusedmlp.quantize_weights(fc1, fc2[:, :, :96], "fp8_block")
    with pytest.raises(
        TypeError, match=r"fc2_weight: expected dtype torch.bfloat16 or torch.float32.*; got torch.float16"
    ):
        fusedmlp.quantize_weights(fc1, fc2.half(), "mxfp8")
    with pytest.raises(
        TypeError, match="fc1_weight: expected a tensor or a sequence of one tensor per expert; got int 3"
    ):
        fusedmlp.quantize_weights(3, fc2, "mxfp8")


@EIGHT_BITS
def test_operators_of_copies_have_no_derivative(recipe):
    """A copy serves one direction, so an operator that has the one of forward cannot make dx."""
    w, offsets = torch.randn(2, F, H), torch.tensor([0, 70, 140], dtype=torch.int32)
    copy = [*ops.quantize_weights([w], recipe, "torch")[:2]]
    x = torch.randn(140, H).bfloat16().requires_grad_()
    y = torch.ops.fusedmlp.grouped_gemm(x, copy, [], offsets, f"{recipe}/{recipe}", False, "torch")
    with pytest.raises(RuntimeError, match="expected x and weights, as a copy of them in 8 bits serves one direction"):
        y.sum().backward()
