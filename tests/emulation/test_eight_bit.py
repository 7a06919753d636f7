"""Whole layers of 8-bit recipes, forward and backward into float32 main_grads: compiled kernels against the CPU."""

from collections import Counter

import pytest
import torch
from emulation.layers import emulated
from support.eight_bit import distances
from support.eight_bit_layer import COUNTS, LAYERS, F, H, Layer
from torch.nn import Parameter

import fusedmlp
from fusedmlp.kernels.fc1_act import quantized_launch
from fusedmlp.kernels.gemm import launch

RECIPES = {"fp8_block": "sm_90", "mxfp8": "sm_100"}
# Norms of differences: sums are added in another order, and then few values of h, y, dx and dh are rounded another way.
ALLOWED = {"y": 1e-4, "dx": 1e-4, "dprobs": 1e-4, "dfc1": 1e-6, "dfc2": 1e-6, "dbias1": 1e-4, "dbias2": 1e-6}
pytestmark = pytest.mark.usefixtures("poison")


def compare(got, want, allowed=ALLOWED):
    found = distances(got, want)
    assert all(distance <= allowed[name] for name, distance in found.items()), found


def names(launched):
    return {each.kernel.removeprefix("_").removesuffix("_kernel") for each in launched}


QUICK = ("swiglu", "biases")
EACH = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.exhaustive]) for kind in LAYERS]


@pytest.mark.sparse
@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer(recipe, wgrad, kind):
    layer = Layer(**LAYERS[kind])
    with emulated(RECIPES[recipe]) as launched:
        got = layer.results(recipe=recipe, impl="triton", wgrad=wgrad)
    own = {"quantize", "quantize_weights", "dgrad_act_quantize", f"grouped_fc1_act_{recipe}", f"grouped_gemm_{recipe}"}
    assert own <= names(launched)
    assert "act_quantize" not in names(launched)
    assert any(name.startswith("grouped_wgrad_") and recipe in name for name in names(launched)) == (wgrad == "recipe")
    if layer.biases[0] is None:
        compare(got, layer.results(recipe=recipe, impl="torch", wgrad=wgrad))
    else:  # GEMMs add them before they round, so the CPU is no reference; float64 rounds more values of dh another way
        compare(got, layer.expected(recipe, wgrad, fused_bias=True), dict.fromkeys(ALLOWED, 1e-4))
    assert not got["y"][sum(COUNTS) :].any()
    assert not got["dfc1"][1].any()  # no rows


def test_linear_channels_within_a_chunk_of_scales():
    """fc1 stores `h`, which another launch reads."""
    layer = Layer(F=96)
    with emulated("sm_100") as launched:
        got = layer.results(recipe="mxfp8", impl="triton")
    assert "act_quantize" in names(launched)
    assert "grouped_fc1_act_mxfp8" not in names(launched)
    compare(got, layer.results(recipe="mxfp8", impl="torch"))


@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["swiglu", "list of experts", "in_out", "float32 weights"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_copies_of_weights(recipe, kind):
    """Both copies are made in one launch a weight, with the bits of the CPU, and give a layer the bits of its own."""
    fresh, kept = Layer(**LAYERS[kind]), Layer(**LAYERS[kind])
    with emulated(RECIPES[recipe]) as launched:
        want = fresh.results(recipe=recipe, impl="triton")
        assert sum("quantize_weights" in each.kernel for each in launched) == 4
        launched.clear()
        weights = [group[0] if kept.packed else group for group in kept.params]
        compiled = fusedmlp.quantize_weights(*weights, recipe, weight_layout=kept.layout, impl="triton")
        got = kept.results(recipe=recipe, impl="triton", quantized_weights=compiled)
        again = kept(recipe=recipe, impl="triton", quantized_weights=compiled)
        assert sum("quantize_weights" in each.kernel for each in launched) == 2
    for name, t in got.items():
        assert torch.equal(t, want[name]), name
    assert torch.equal(again.double(), got["y"])
    reference = fusedmlp.quantize_weights(*weights, recipe, weight_layout=kept.layout, impl="torch")
    for mine, right in zip((*compiled.fc1, *compiled.fc2), (*reference.fc1, *reference.fc2), strict=True):
        assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["swiglu", "biases"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_tokens(recipe, kind):
    """One launch reads x once for both copies, and a layer has the bits of one that quantizes it twice."""
    results, numbers = [], []
    for save in ("x", "tokens"):
        with emulated(RECIPES[recipe]) as launched:
            results.append(Layer(**LAYERS[kind]).results(recipe=recipe, impl="triton", save=save))
        numbers.append(Counter(each.kernel for each in launched))
    want, got = results
    for name, t in got.items():
        assert torch.equal(t, want[name]), name
    assert numbers[0] - numbers[1] == {"_quantize_kernel": 1}
    assert numbers[1] - numbers[0] == {"_plan_kernel": 1}  # of every operator, as counts are on the host


@pytest.mark.sparse
@pytest.mark.parametrize("wgrad", ["at once", "delayed", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_microbatches(recipe, wgrad):
    """Rows of a second micro-batch belong to other experts."""

    def run(impl):
        layer = Layer()
        queue = None if wgrad == "at once" else fusedmlp.WgradQueue(fuse_microbatches=wgrad == "fused")
        weights = [group[0] for group in layer.params]
        buffer = fusedmlp.MainGradBuffer(weights)
        buffer.zero_grad()
        for counts in (COUNTS, COUNTS[::-1]):
            options = {"probs": layer.probs, "recipe": recipe, "impl": impl, "wgrad_queue": queue}
            fusedmlp.grouped_mlp(layer.x, *weights, list(counts), **options).backward(layer.dy)
        if queue is not None:
            queue.run()
        found = {f"dfc{i + 1}": w.main_grad.double() for i, w in enumerate(weights)}
        buffer.detach()
        return found

    with emulated(RECIPES[recipe]) as launched:
        got = run("triton")
    assert sum(each.kernel.startswith("grouped_wgrad") for each in launched) == (2 if wgrad == "fused" else 4)
    compare(got, run("torch"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_routed_tokens(recipe):
    """Rows are gathered from tokens, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    E, T = 3, 128
    shapes = (2 * F, H), (H, F)
    weights = [(torch.randn(E, *shape, generator=generator) / 16).bfloat16() for shape in shapes]
    x, probs = torch.randn(T, H, generator=generator).bfloat16(), torch.rand(T, 2, generator=generator)
    index = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(T)])
    dy = torch.randn(T, H, generator=generator).bfloat16()

    def run(impl):
        params, given = [Parameter(w.clone()) for w in weights], x.clone().requires_grad_()
        of_probs = probs.clone().requires_grad_()
        y = fusedmlp.moe_experts(given, index, of_probs, *params, recipe=recipe, impl=impl)
        y.backward(dy)
        found = {"y": y.detach(), "dx": given.grad, "dprobs": of_probs.grad}
        return {name: t.double() for name, t in found.items()}, [w.grad.double() for w in params]

    with emulated(RECIPES[recipe]):
        got, wgrads = run("triton")
    want, expected = run("torch")
    compare(got, want)
    for mine, other in zip(wgrads, expected, strict=True):
        assert distances({"dw": mine}, {"dw": other})["dw"] < 2**-9  # the gradients are bf16


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_linear_layer(recipe):
    layer = Layer()
    x, (w, _) = layer.x, layer.logical
    dy = torch.randn(len(x), w.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()

    def run(impl):
        param, given = Parameter(w.clone()), x.clone().requires_grad_()
        buffer = fusedmlp.MainGradBuffer([param])
        buffer.zero_grad()
        y = fusedmlp.grouped_linear(given, param, list(COUNTS), recipe=recipe, impl=impl)
        y.backward(dy)
        found = {"y": y.detach().double(), "dx": given.grad.double(), "dfc1": param.main_grad.double()}
        buffer.detach()
        return found

    with emulated(RECIPES[recipe]):
        got = run("triton")
    compare(got, run("torch"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_at_all(recipe):
    """Only operators can be called so; weight gradients are zeros, or stay as they are."""
    x, dy, offsets = torch.empty(0, H).bfloat16(), torch.empty(0, F).bfloat16(), torch.zeros(3, dtype=torch.int32)
    with emulated(RECIPES[recipe]):
        for accumulate, expected in ((False, 0.0), (True, 0.5)):
            dw = torch.full((2, F, H), 0.5)
            own = (accumulate, f"{recipe}/{recipe}", "triton")
            torch.ops.fusedmlp.grouped_wgrad_([dw], [], [dy], [x], [offsets], [], [], *own)
            assert (dw == expected).all()
        w = torch.ones(2, F, H).bfloat16()
        assert torch.ops.fusedmlp.grouped_gemm(x, [w], [], offsets, f"{recipe}/{recipe}", False, "triton").shape == (
            0,
            F,
        )


def test_refused_by_a_triton_without_gluon(monkeypatch):
    for module in (launch, quantized_launch):
        monkeypatch.setattr(module, "gluon_missing", lambda: "Triton 9.9 has no Gluon that fits: no tma")
    with (
        emulated("sm_90") as launched,
        pytest.raises(NotImplementedError, match=r"Triton 9\.9 has no Gluon"),
    ):
        Layer()(recipe="fp8_block", impl="triton")
    assert not launched


def test_refused_where_there_are_no_kernels():
    with emulated("sm_80") as launched, pytest.raises(NotImplementedError, match="recipe='fp8_block': expected a GPU"):
        Layer()(recipe="fp8_block", impl="triton")
    assert not launched
