"""Adapters of experts, `W x + scaling * B (A x)`, against float64 with dense weights `W + scaling * B A`."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import tiles
from cases.adapters import K, Layer, T
from support import invariance
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import fusedmlp
from fusedmlp import LoRA, debug
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles import table

pytestmark = pytest.mark.sparse
E, H, R, COUNTS = 4, Layer.H, 40, list(Layer.COUNTS)
IMPLS = ["torch", "triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch"]
FUNCTIONS = ["grouped_mlp", "moe_experts", "grouped_linear"]
RANKS = {"both": (8, 3), "fc1 alone": (8, None), "fc2 alone": (None, 128)}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize(
    ("dtype", "of_adapters"),
    [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float16, torch.float32)],
    ids=["fp32", "fp32 beside bf16", "bf16", "fp32 beside fp16"],
)
def test_against_dense_weights(function, ranks, activation, dtype, of_adapters, poison):
    Layer(function, ranks, dtype, of_adapters, activation).check()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "frozen", [("fc1", "fc2", "b1", "b2"), ("x", "fc1", "fc2", "b1", "b2", "probs"), ("A1", "B1"), ("A1",)], ids=str
)
def test_frozen_parts(function, frozen, poison):
    Layer(function).check(frozen)


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["packed", "apart", "reversed"])
def test_kernels(function, ranks, layout, dtype, where, poison):
    Layer(function, ranks, dtype, layout=layout, where=where).check(impl="triton")


class Even(Layer):
    COUNTS = (10, 10, 10, 10)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_even_loads(function, dtype, poison):
    Even(function, dtype=dtype).check()


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_reversed_experts_in_kernels(function, poison):
    Layer(function, where="reversed").check(impl="triton")


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("function", ["grouped_mlp", "moe_experts"])
def test_kernels_keep_the_paths_of_a_layer_without_adapters(function, layout):
    """Whatever the rank: `A` and `B` are made to lie as the weights do, in whole vectors. Without adapters, rows of
    tokens would be sorted first.
    """
    paths = []
    for ranks in ((3, 5), (None, None)):
        layer = Layer(function, ranks, layout=layout)
        gathering = tiles.changed(replace), mock.patch.dict(table.SORT_FIRST, clear=True)  # by programs planned anew
        with gathering[0], gathering[1], recording() as launches:
            layer.results(layer.fused, impl="triton")
        paths.append([launch.path for launch in launches if launch.name in ("grouped_fc1_act", "grouped_dgrad_act")])
        multiplied = [launch for launch in launches if launch.name == "grouped_gemm"]
        assert {launch.path for launch in multiplied} <= {"tma", "gather"}
        assert len(multiplied) == 2 + 2 * sum(rank is not None for rank in ranks)
    assert paths[0] == paths[1]


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("frozen", [("fc1", "fc2", "b1", "b2"), ("x", "fc1", "fc2"), ("A1", "B1"), ("A1",)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_frozen_parts_in_kernels(function, frozen, poison):
    Layer(function).check(frozen, impl="triton")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_batch_does_not_change_the_bits_of_a_row(function):
    layer = invariance.Layer(function, H=33, F=21)
    out = layer.weights[0].shape[1]
    lora = LoRA(torch.randn(3, 5, 33), torch.randn(3, out, 5), 0.7)
    layer.options |= {"lora" if function == "grouped_linear" else "fc1_lora": lora}
    if function != "grouped_linear":
        layer.options |= {"fc2_lora": LoRA(torch.randn(3, 4, 21), torch.randn(3, 33, 4))}
    invariance.check(layer)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_a_graph(function, monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(getattr(fusedmlp, function), fullgraph=True, backend="aot_eager", dynamic=True)
    monkeypatch.setattr(fusedmlp, function, compiled)
    Layer(function).check(frozen=("fc1", "fc2"))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_adapters_are_in_16_bits_beside_weights_in_8(recipe):
    """With a weight of zeros only the adapter is left, which no recipe quantizes."""
    x, dy = torch.randn(256, 64).bfloat16(), torch.randn(256, 32).bfloat16()
    w = torch.zeros(2, 32, 64)
    A, B = torch.randn(2, 4, 64, requires_grad=True), torch.randn(2, 32, 4, requires_grad=True)
    results = []
    for name in (None, recipe):
        weight = w.bfloat16() if name is None else w
        y = fusedmlp.grouped_linear(x, weight, [128, 128], lora=LoRA(A, B, 0.5), recipe=name)
        results.append((y, *torch.autograd.grad(y, (A, B), dy)))
    for plain, got in zip(*results, strict=True):
        assert torch.equal(plain, got)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_fp32_adapters_are_not_rounded(impl):
    """Sums of whole numbers have more digits than bfloat16, and are exact in float32."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape, dtype=torch.float32):
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    x, dy, w = (numbers(*shape, dtype=torch.bfloat16) for shape in ((300, 4), (300, 16), (1, 16, 4)))
    A, B = numbers(1, 2, 4).requires_grad_(), numbers(1, 16, 2).requires_grad_()
    y = fusedmlp.grouped_linear(x, w, [300], lora=LoRA(A, B), impl=impl)
    dA, dB = torch.autograd.grad(y, (A, B), dy)
    x, dy = x.float(), dy.float()
    assert torch.equal(dA[0], (dy @ B[0]).T @ x)
    assert torch.equal(dB[0], dy.T @ (x @ A[0].T))
    assert not torch.equal(dB, dB.bfloat16().float())
    if impl == "torch":  # fc1 is the identity
        fc1, fc2, dy = torch.eye(4).bfloat16()[None], w[:, :4], dy[:, :4]
        lora = LoRA(A, B := B.detach()[:, :4].requires_grad_())
        y = fusedmlp.grouped_mlp(x.bfloat16(), fc1, fc2, [300], activation="relu", fc2_lora=lora, impl=impl)
        dA, dB = torch.autograd.grad(y, (A, B), dy.bfloat16())
        assert torch.equal(dA[0], (dy @ B[0]).T @ x.relu())
        assert torch.equal(dB[0], dy.T @ (x.relu() @ A[0].T))
        assert not torch.equal(dB, dB.bfloat16().float())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("counts", [[64], [60, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_float16_adapters_do_not_need_operands_in_the_range_of_float16(impl, counts, dtype):
    size, number = len(counts), sum(counts)
    x, w, dy = torch.full((number, 16), 2.0**17), torch.zeros(size, 16, 16), torch.full((number, 16), 2.0**-27)
    A, B = (torch.ones(size, *shape, dtype=torch.float16, requires_grad=True) for shape in ((4, 16), (16, 4)))
    y = fusedmlp.grouped_linear(x.to(dtype), w.to(dtype), counts, lora=LoRA(A, B, 2.0**-10), impl=impl)
    dA, dB = torch.autograd.grad(y, (A, B), dy.to(dtype))
    for e, count in enumerate(counts):
        assert torch.equal(dA[e], torch.full_like(dA[e], count * 2.0**-16))
        assert torch.equal(dB[e], torch.full_like(dB[e], count * 2.0**-16))


def test_debug_mode_names_an_adapter_that_is_not_finite(monkeypatch, caplog):
    monkeypatch.setattr(debug, "enabled", True)
    layer = Layer("grouped_linear")
    layer.leaves["A1"][0, 0, 0] = float("nan")
    layer.results(layer.fused)
    assert "not finite before it: lora" in caplog.text
    assert "wgrad of grouped_linear: expected finite gradients" in caplog.text


def test_delayed_weight_gradients_and_main_grad():
    layer, queue = Layer("grouped_mlp"), fusedmlp.WgradQueue()
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves.items()}
    for name in ("fc1", "fc2"):
        leaves[name] = torch.nn.Parameter(leaves[name].detach())
    fusedmlp.MainGradBuffer([leaves["fc1"], leaves["fc2"]])
    layer.fused(leaves, wgrad_queue=queue).backward(layer.dy)
    assert len(queue) == 2
    queue.run()
    for name, expected in layer.results(layer.dense, torch.float64).items():
        if name != "y":
            torch.testing.assert_close(leaves[name[1:]].grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_as_large_as_the_weights_and_the_products_that_are_needed(function):
    layer = Layer(function)
    frozen = ("fc1", "fc2", "b1", "b2")
    with profile(profile_memory=True, record_shapes=True) as profiled, FlopCounterMode(display=False) as flops:
        layer.results(layer.fused, frozen=frozen)
    largest = min(layer.leaves[name].numel() for name in ("fc1", "fc2") if name in layer.leaves)
    sizes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(sizes) < 4 * largest
    rows = T * K if function == "moe_experts" else R
    base = sum(2 * layer.leaves[name][0].numel() for name in ("fc1", "fc2") if name in layer.leaves)
    adapters = sum(3 * 2 * layer.leaves[name][0].numel() for name in ("A1", "B1", "A2", "B2") if name in layer.leaves)
    assert flops.get_total_flops() == rows * (2 * base + adapters)


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
def test_costs_of_launches():
    """An adapter's t and b are read by the pass that adds their product."""
    frozen, costs = ("fc1", "fc2", "b1", "b2"), []
    for ranks in ((16, 16), (None, None)):
        layer = Layer("grouped_mlp", ranks)
        with recording() as launches:
            layer.results(layer.fused, frozen=frozen, impl="triton")
        costs.append([launch.cost_of(COUNTS) for launch in launches if launch.cost])
    rows, factors = sum(COUNTS), sum(factor[0].numel() for factor in Layer("grouped_mlp", (16, 16)).adapters())
    flops = [sum(cost.flops for cost in each) for each in costs]
    assert flops[0] - flops[1] == 3 * 2 * rows * factors
    G, F, used = 2 * Layer.F, Layer.F, 3
    for name, width in (("fc1_act", G), ("dgrad_act", F)):
        with_it, without = (next(cost.bytes for cost in each if cost.kernel == name) for each in costs)
        assert with_it - without == 4 * 16 * (rows + used * width)


def test_a_saved_program_has_adapters(tmp_path):
    layer = Layer("grouped_mlp")

    class Model(torch.nn.Module):
        def forward(self, leaves):
            return layer.fused(leaves)

    program = torch.export.export(Model(), (layer.leaves,))
    torch.testing.assert_close(program.module()(layer.leaves), layer.fused(layer.leaves))


WRONG = {
    "no LoRA": (lambda lora: (lora.A, lora.B), TypeError, "lora: expected a fusedmlp.LoRA or None; got tuple"),
    "a list": (lambda lora: lora._replace(A=[1]), TypeError, r"lora.A: expected a tensor of .*; got list \[1\]"),
    "integers": (lambda lora: lora._replace(A=lora.A.int()), TypeError, r"lora.A: .*; got torch.int32"),
    "dtypes": (
        lambda lora: lora._replace(B=lora.B.bfloat16()),
        TypeError,
        "lora.B: expected dtype torch.float32, that",
    ),
    "rank": (
        lambda lora: lora._replace(A=torch.ones(E, 129, H)),
        ValueError,
        r"lora.A: .* r from 1 to 128; got \(4, 1",
    ),
    "width": (
        lambda lora: lora._replace(A=torch.ones(E, 8, 9)),
        ValueError,
        r"lora.A: expected shape \[4, r, 48\] with",
    ),
    "B": (lambda lora: lora._replace(B=torch.ones(E, 8, 64)), ValueError, r"lora.B: expected shape \(4, 64, 8\); got"),
    "scaling": (
        lambda lora: lora._replace(scaling=torch.ones(())),
        TypeError,
        "lora.scaling: expected a number; got T",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_adapters_are_refused(case):
    change, error, message = WRONG[case]
    layer = Layer("grouped_linear")
    lora = change(layer.adapter(layer.leaves, 1))
    with pytest.raises(error, match=message):
        fusedmlp.grouped_linear(layer.leaves["x"], layer.leaves["fc1"], COUNTS, lora=lora)


@pytest.mark.skipif("triton" not in IMPLS, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_kernels_that_multiply_in_8_bits_take_no_adapters(recipe):
    layer = type("Blocks", (Layer,), {"H": 128, "F": 128, "COUNTS": (130, 0, 125, 1)})("grouped_mlp")
    with pytest.raises(NotImplementedError, match="fc1_lora, fc2_lora: expected no 8-bit recipe, or impl="):
        layer.fused(layer.leaves, impl="triton", recipe=recipe)


def test_gathered_rows_are_freed_before_the_output_is_made():
    """Both have a row for every choice; all else is small."""
    T, K, width = 128, 8, 256
    x, probs, ids = torch.randn(T, width), torch.rand(T, K), torch.arange(K).expand(T, K).contiguous()
    fc1, fc2 = torch.randn(K, 16, width), torch.randn(K, width, 8)
    with profile(profile_memory=True) as profiled, torch.no_grad():
        fusedmlp.moe_experts(x, ids, probs, fc1, fc2, impl="torch")
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = [0]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live.append(live[-1] + event.nbytes())
    rows = 4 * K * T * width
    assert rows < max(live) < 1.9 * rows
