"""8-bit copies of weights that outlive a call. Those in 16 bits: test_recipe.py."""

import pytest
import torch
from support.eight_bit_layer import COUNTS, LAYERS, F, H, Layer
from support.weight_changes import in_place, moved, through_data, unseen
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.kernels.operands import quantized
from fusedmlp.operators import ops, torch_products, torch_quantize
from fusedmlp.recipe import BLOCKS

RECIPES = pytest.mark.parametrize("recipe", BLOCKS)
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo


@pytest.fixture
def made(monkeypatch):
    """Recipes of the copies that were made."""
    found, original = [], ops.quantize_weights
    monkeypatch.setattr(
        ops, "quantize_weights", lambda w, recipe, impl: (found.append(recipe), original(w, recipe, impl))[1]
    )
    return found


def weights(layer):
    return [group[0] if layer.packed else group for group in layer.params]


def copies(layer, recipe):
    return fusedmlp.quantize_weights(*weights(layer), recipe, weight_layout=layer.layout)


def alike(got, want):
    """The same 8-bit operands were multiplied, in fp32: a copy lies in another layout, of which some CPUs' GEMMs sum in
    another order, and then a 16-bit result may round to its neighbour.
    """
    torch.testing.assert_close(got.double(), want.double(), rtol=2**-7, atol=2**-18 * want.abs().max().item())


def same(got, want):
    assert got.keys() == want.keys()
    for name, t in got.items():
        alike(t, want[name])


@RECIPES
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_results_are_those_of_a_layer_that_quantizes(kind, wgrad, recipe, made, monkeypatch):
    fresh, given = (Layer(**LAYERS[kind]) for _ in range(2))
    want = fresh.results(recipe=recipe, wgrad=wgrad)
    assert not made
    monkeypatch.delattr(torch_products, "rounded_weights")  # which quantizes for one product
    same(given.results(recipe=recipe, wgrad=wgrad, quantized_weights=copies(given, recipe)), want)
    assert made == [recipe] * 2


@RECIPES
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


@RECIPES
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
def test_weights_are_quantized_once_for_the_micro_batches_of_a_step(recipe, made):
    kept, fresh = Layer(), Layer()
    buffers = [fusedmlp.MainGradBuffer([p for (p,) in layer.params]) for layer in (kept, fresh)]
    for _ in range(2):
        made.clear()
        held = copies(kept, recipe)
        for layer, buffer in zip((kept, fresh), buffers, strict=True):
            buffer.zero_grad()
            for _ in range(3):
                layer(recipe=recipe, quantized_weights=held if layer is kept else None).backward(layer.dy)
        assert len(made) == 2
        for (mine,), (other,) in zip(kept.params, fresh.params, strict=True):
            alike(mine.main_grad, other.main_grad)
            with torch.no_grad():
                for param in (mine, other):
                    param.sub_(mine.main_grad)


@pytest.mark.parametrize("change", [unseen, through_data, in_place, moved])
@RECIPES
def test_a_call_without_copies_multiplies_weights_as_they_are(recipe, change):
    layer = Layer(bias=False)
    x = torch.nan_to_num(layer.x)
    before = layer(x, recipe=recipe)
    change(layer.params[1][0])
    assert before.any()
    assert torch.equal(layer(x, recipe=recipe), 2 * before)  # fc2 is doubled


@pytest.mark.parametrize("change", [in_place, moved])
@RECIPES
def test_copies_of_weights_that_were_written_are_refused(recipe, change):
    layer = Layer()
    held = copies(layer, recipe)
    y = layer(recipe=recipe, quantized_weights=held)
    change(layer.params[1][0])
    with pytest.raises(RuntimeError, match=r"expected copies of these weights as they are; .* \(call quantize_weights"):
        layer(recipe=recipe, quantized_weights=held)
    rows = slice(sum(COUNTS))
    assert torch.equal(layer(recipe=recipe, quantized_weights=copies(layer, recipe))[rows], 2 * y[rows])


@RECIPES
def test_copies_of_other_weights_are_refused(recipe):
    """Of another layer; and, where sizes do not tell them apart, of weights that lie the other way."""
    layer, other = Layer(), Layer()
    with pytest.raises(RuntimeError, match="got copies of others"):
        layer(recipe=recipe, quantized_weights=copies(other, recipe))
    square = [Parameter(torch.randn(2, 128, 128)) for _ in range(2)]
    held = fusedmlp.quantize_weights(*square, recipe)
    options = {"recipe": recipe, "quantized_weights": held, "activation": "gelu"}
    x = torch.randn(140, 128)
    fusedmlp.grouped_mlp(x, *square, [70, 70], **options)
    with pytest.raises(ValueError, match=r"weight_layout='out_in', as they were made with; got .* and 'in_out'"):
        fusedmlp.grouped_mlp(x, *square, [70, 70], weight_layout="in_out", **options)


@RECIPES
def test_few_rows_multiply_weights_in_16_bits(recipe, made):
    layer = Layer()
    x, few = torch.randn(9, H).bfloat16(), [3, 0, 2, 1, 3]
    want = fusedmlp.grouped_mlp(x, *weights(layer), few, recipe="bf16")
    got = fusedmlp.grouped_mlp(x, *weights(layer), few, recipe=recipe, quantized_weights=copies(layer, recipe))
    assert torch.equal(got, want)
    assert made == [recipe] * 2


@pytest.mark.slow
@RECIPES
@pytest.mark.parametrize("what", ["delayed", "checkpoint", "compiled", "inference"])
def test_in_other_surroundings(what, recipe):
    layer, plain = Layer(), Layer()
    want = plain.results(recipe=recipe)
    held = copies(layer, recipe)
    if what == "delayed":
        same(layer.results(recipe=recipe, quantized_weights=held, wgrad_queue=fusedmlp.WgradQueue()), want)
        return
    if what == "inference":
        with torch.inference_mode():
            assert torch.equal(layer(recipe=recipe, quantized_weights=held).double(), want["y"])
            params = [w.clone() for w in weights(layer)]
            own = fusedmlp.quantize_weights(*params, recipe)
            options = {"probs": layer.probs, "recipe": recipe, "quantized_weights": own}
            assert torch.equal(fusedmlp.grouped_mlp(layer.x, *params, list(COUNTS), **options).double(), want["y"])
        return
    run = layer.__call__
    if what == "compiled":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for (param,) in layer.params:
        param.main_grad = torch.zeros(param.shape)
    x = layer.x.clone().requires_grad_()
    layer.probs = Parameter(layer.probs)
    options = {"recipe": recipe, "quantized_weights": held}
    y = checkpoint(run, x, use_reentrant=False, **options) if what == "checkpoint" else run(x, **options)
    y.backward(layer.dy)
    found = {"y": y, "dx": x.grad, "dprobs": layer.probs.grad}
    found |= {f"dfc{i + 1}": param.main_grad for i, (param,) in enumerate(layer.params)}
    same({name: t.double() for name, t in found.items()}, want)


@RECIPES
def test_tokens(recipe):
    layer, generator = Layer(), torch.Generator().manual_seed(0)
    index = torch.rand(200, 5, generator=generator).topk(2).indices
    x, probs = torch.randn(200, H, generator=generator).bfloat16(), torch.rand(200, 2, generator=generator)
    results = []
    for held in (None, copies(layer, recipe)):
        given = x.clone().requires_grad_()
        y = fusedmlp.moe_experts(given, index, probs, *weights(layer), recipe=recipe, quantized_weights=held)
        results.append([y, *torch.autograd.grad(y.sum(), [given, *weights(layer)])])
    for got, want in zip(*results, strict=True):
        alike(got, want)


def test_errors():
    layer = Layer()
    fc1, fc2 = weights(layer)
    held = fusedmlp.quantize_weights(fc1, fc2, "mxfp8")
    with pytest.raises(ValueError, match=r"expected recipe='mxfp8' and .*; got 'fp8_block' and"):
        layer(recipe="fp8_block", quantized_weights=held)
    with pytest.raises(ValueError, match=r"expected recipe='mxfp8' and .*; got None and"):
        layer(quantized_weights=held)
    with pytest.raises(TypeError, match="quantized_weights: expected None or QuantizedWeights; got tuple"):
        layer(recipe="mxfp8", quantized_weights=(*held.fc1, *held.fc2))
    with pytest.raises(
        ValueError, match=r"copies of fc1_weight, shape \(5, 256, 256\) on cpu; got shape \(5, 256, 128\)"
    ):
        layer(recipe="mxfp8", quantized_weights=fusedmlp.quantize_weights(fc2, fc1, "mxfp8"))
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


@RECIPES
def test_operators_of_copies_have_no_derivative(recipe):
    """A copy serves one direction, so an operator that has the one of forward cannot make dx."""
    w, offsets = torch.randn(2, F, H), torch.tensor([0, 70, 140], dtype=torch.int32)
    copy = [*ops.quantize_weights([w], recipe, "torch")[:2]]
    x = torch.randn(140, H).bfloat16().requires_grad_()
    y = torch.ops.fusedmlp.grouped_gemm(x, copy, [], offsets, f"{recipe}/{recipe}", "torch")
    with pytest.raises(RuntimeError, match="expected x and weights, as a copy of them in 8 bits serves one direction"):
        y.sum().backward()
