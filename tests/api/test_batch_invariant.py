"""`batch_invariant=True`: bits of a row's `y`, `dx` and `dprobs` depend on nothing but the row and the weights."""

import os
from contextlib import nullcontext

import pytest
import torch
from cases import tiles
from support import invariance
from support.invariance import Layer

import fusedmlp
from fusedmlp.activation import KINDS
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles import select, table

pytestmark = pytest.mark.sparse
FUNCTIONS = ["grouped_mlp", "moe_experts", "grouped_linear"]
# Sizes that leave the last elements of a row to other instructions than the rest.
SIZES = [{"H": 33, "F": 21}, {"H": 33, "F": 20}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLS = ["torch", "triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch"]
EIGHT_BITS = {"H": 256, "F": 128, "dtype": torch.bfloat16}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_of_pytorch(activation, dtype):
    for sizes in SIZES:
        invariance.check(Layer("grouped_mlp", activation=activation, dtype=dtype, impl="torch", **sizes))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [None, "bf16", "fp8_block", "mxfp8"])
def test_functions_and_recipes_of_pytorch(function, bias, recipe):
    sizes = EIGHT_BITS if recipe in ("fp8_block", "mxfp8") else SIZES[0]
    invariance.check(Layer(function, bias=bias, recipe=recipe, impl="torch", **sizes))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("H", "F"), [(4, 40_000), (40_000, 4)])
def test_sums_that_threads_would_share(H, F):
    """PyTorch divides the sum of one long row among threads; a bias of fc2 adds a sum over H."""
    layer = Layer("grouped_mlp", H=H, F=F, bias=True, impl="torch")
    invariance.check(layer, rows=(0, 128))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("features", [1, 2, 4, 7])
@pytest.mark.parametrize("function", ["grouped_mlp", "grouped_linear"])
def test_few_output_features(function, features):
    """MKL divides rows among threads there."""
    rows = (0, *range(1, 129, 3), 128)
    invariance.check(Layer(function, H=1024, F=features, activation="silu", impl="torch"), rows)
    if function == "grouped_linear":  # the gradient of x has these features
        invariance.check(Layer(function, H=features, F=1024, activation="silu", impl="torch"), rows)


def test_what_lies_between_rows_of_a_weight_is_not_read():
    """oneDNN reads it, and multiplies it by zero."""
    wide = torch.full((2, 64, 103), torch.nan, dtype=torch.bfloat16)
    w, x = wide[:, :, :100].copy_(torch.randn(2, 64, 100)), torch.randn(70, 100).bfloat16()
    y = fusedmlp.grouped_linear(x, w, [30, 40], batch_invariant=True, impl="torch")
    torch.testing.assert_close(y, fusedmlp.grouped_linear(x, w.contiguous(), [30, 40], impl="torch"))


@pytest.mark.parametrize("activation", KINDS)
def test_gradients_far_from_zero_are_as_finite_as_pytorchs(activation):
    x = torch.tensor([[-1e19, -2e13, -300.0, -100.0, 100.0, 300.0, 2e13, 1e19]]).T
    w = torch.ones(1, 2 if KINDS[activation].gated else 1, 1)
    w[:, 1:] = 0
    grads = []
    for batch_invariant in (False, True):
        leaf = x.clone().requires_grad_()
        options = {"activation": activation, "batch_invariant": batch_invariant, "impl": "torch"}
        y = fusedmlp.grouped_mlp(leaf, w, torch.ones(1, 1, 1), [8], fc1_bias=torch.ones(w.shape[:2]), **options)
        y.sum().backward()
        grads.append(leaf.grad)
    assert (grads[1].isfinite() | ~grads[0].isfinite()).all()


@pytest.mark.parametrize("in_out", [False, True])
def test_lists_and_layouts_of_pytorch(in_out):
    layer = Layer("grouped_mlp", H=33, F=21, impl="torch")
    if in_out:
        layer.options["weight_layout"] = "in_out"
        layer.weights = [w.mT.contiguous() for w in layer.weights]
    layer.weights = [[*w.unbind()] for w in layer.weights]
    invariance.check(layer)


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"bias": True, "activation": "geglu"},
        {"recipe": "mxfp8", **EIGHT_BITS},
    ],
    ids=["bf16", "fp32 bias", "mxfp8"],
)
def test_interpreted_kernels(function, options):
    with on_blackwell(options):
        invariance.check(Layer(function, impl="triton", **options), rows=(0, 77))


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
def test_launches_do_not_depend_on_the_load_or_on_addresses():
    """Without the mode an odd address changes the path."""
    layer = Layer("grouped_mlp", impl="triton", dtype=torch.bfloat16)

    def launched(*args, **options):
        with recording() as launches:
            layer.run(*args, **options)
        return [launch.chosen for launch in launches if launch.chosen and "wgrad" not in launch.name]

    one = [1, 0, 0]
    every = launched()
    assert len(every) == 4
    assert every == launched([0], one) == launched([0], one, padding=300) == launched([0], one, odd=True)
    layer.options["batch_invariant"] = False
    assert launched() != every  # 43 rows an expert are few
    assert launched(odd=True) != launched()


def on_blackwell(options):
    """Kernels for recipe mxfp8, which the interpreter's own table has not."""
    target = select.Target("sm_120", 3, table.TABLES["sm_120"])
    return tiles.planned_for(target) if "recipe" in options else nullcontext()


@pytest.mark.parametrize("impl", IMPLS)
def test_8_bits_at_any_number_of_rows(impl):
    layer, one = Layer("grouped_mlp", recipe="mxfp8", impl=impl, **EIGHT_BITS), [1, 0, 0]
    with on_blackwell(layer.options):
        alone = layer.run([0], one)
        layer.options["batch_invariant"] = False
        assert not torch.equal(layer.run([0], one).y, alone.y)
        copies = fusedmlp.quantize_weights(*layer.weights, "mxfp8", impl=impl)
        layer.options |= {"batch_invariant": True, "quantized_weights": copies}
        assert torch.equal(layer.run([0], one).y, alone.y)
        assert layer.run([], [0, 0, 0]).y.shape == (0, 256)


@pytest.mark.parametrize("impl", IMPLS)
def test_numbers_are_those_of_the_layer(impl):
    for function in FUNCTIONS:
        layer = Layer(function, H=40, F=24, impl=impl, activation="geglu_tanh")
        own = layer.run()
        layer.options["batch_invariant"] = False
        for got, expected in zip(own, layer.run(), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_without_the_mode_bits_differ():
    """Otherwise nothing here would be tested."""
    layer = Layer("grouped_mlp", H=33, F=21, impl="torch", batch_invariant=False)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ differ"):
        invariance.check(layer)


def test_modules_pass_it_on_and_show_it():
    module = fusedmlp.GroupedMLP(2, 33, 21, batch_invariant=True)
    assert repr(module).count("batch_invariant=True") == 3
    x, ids, probs = torch.randn(40, 33), torch.randint(2, (40, 1)), torch.rand(40, 1)
    assert torch.equal(module.forward_tokens(x, ids, probs)[7], module.forward_tokens(x[7:8], ids[7:8], probs[7:8])[0])
    rows = module.fc1(x, [30, 10])
    assert torch.equal(rows[35], module.fc1(x[35:36], [0, 1])[0])
    assert torch.equal(module(x, [30, 10])[35], module(x[35:36], [0, 1])[0])


def test_it_is_a_bool():
    with pytest.raises(TypeError, match="batch_invariant: expected"):
        fusedmlp.GroupedMLP(2, 4, 4, batch_invariant=2)
    with pytest.raises(TypeError, match="batch_invariant: expected"):
        fusedmlp.grouped_linear(torch.ones(2, 4), torch.ones(2, 4, 4), [1, 1], batch_invariant="yes")
