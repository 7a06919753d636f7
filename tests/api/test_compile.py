"""`torch.compile(fullgraph=True)`: numbers against plain autograd in float64, recompilation, copies of gradients.

tests/contract/test_compiled.py tests where gradients go.
"""

import copy
from dataclasses import replace

import pytest
import torch
from cases import factory, moe
from support import invariance
from support.compiler import in_graphs
from support.grids import seeds
from torch import nn
from torch._dynamo.utils import counters
from torch.library import opcheck
from torch.profiler import profile

import fusedmlp
from bench.oracle import reference
from bench.oracle.tolerance import assert_close

# Dynamo itself instantiates an autograd.Function while it traces one.
pytestmark = [
    in_graphs,
    pytest.mark.sparse,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),  # imported by inductor
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    # Inductor's cache on disk does not notice that the Python code of an operator changed.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def compiled_functions(monkeypatch):
    for name in ("grouped_mlp", "moe_experts"):
        run = torch.compile(getattr(fusedmlp, name), fullgraph=True, backend="aot_eager", dynamic=True)
        monkeypatch.setattr(fusedmlp, name, run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(5, some=2))
def test_grouped_mlp_with_random_options(seed, compiled_functions, poison):
    case = replace(factory.random_case(seed), delayed=False)
    inputs = factory.Inputs(case)
    expected, low_precision = (factory.reference(inputs, dtype) for dtype in (torch.float64, case.dtype))
    widest = max(case.dtype, case.main_grad_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    assert_close(factory.run(inputs, "torch", DEVICE), expected, low_precision, widest)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(5, some=2))
def test_moe_experts_with_random_options(seed, compiled_functions, poison):
    case = replace(moe.random_case(seed), queue="none")
    inputs = moe.Inputs(case)
    expected, low_precision = (moe.reference(inputs, dtype) for dtype in (torch.float64, case.dtype))
    widest = max(case.dtype, case.main_grad_dtype, case.weights_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    assert_close(moe.run(inputs, "torch", DEVICE), expected, low_precision, widest)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_triton_kernels_inside_a_graph(compiled_functions, poison):
    case = factory.Case(bias=True)
    inputs = factory.Inputs(case)
    expected, low_precision = (factory.reference(inputs, dtype) for dtype in (torch.float64, torch.float32))
    assert_close(factory.run(inputs, "triton", DEVICE), expected, low_precision, torch.float32)
    assert counters["stats"]["unique_graphs"] == 1


class Model(nn.Module):
    """A layer of each kind; the last two take T tokens as rows. All sizes differ, so that shapes identify weights."""

    E, K, H, F, OUT = 3, 2, 8, 5, 7

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fc1 = nn.Parameter(torch.empty(self.E, 2 * self.F, self.H))
        self.fc2 = nn.Parameter(torch.empty(self.E, self.H, self.F))
        self.mlp = fusedmlp.GroupedMLP(self.E, self.H, 2 * self.F + 1, bias=True, packed=False)
        self.linear = nn.Parameter(torch.empty(self.E, self.H, self.OUT))  # [in, out]
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)

    def forward(self, x, ids, probs, counts):
        h = fusedmlp.moe_experts(x, ids, probs, self.fc1, self.fc2).sin()
        h = self.mlp(h, counts, probs[:, 0].contiguous()) + h
        return fusedmlp.grouped_linear(h, self.linear, counts, weight_layout="in_out", accumulate_wgrad="off")

    def loop(self, x, ids, probs, counts):
        """The same in plain PyTorch."""

        def term(t, k):
            e = ids[t, k]
            return reference.expert(x[t : t + 1], self.fc1[e], self.fc2[e], probs[t, k : k + 1]).y

        h = torch.cat([sum(term(t, k) for k in range(self.K)) for t in range(len(x))]).sin()
        counts = counts.tolist()
        mlp, owned = dict(self.mlp.named_parameters()), sum(counts)
        names = ("fc1.weight", "fc2.weight"), ("fc1.bias", "fc2.bias")
        weights, biases = ([[mlp[f"{name}{e}"] for e in range(self.E)] for name in kind] for kind in names)
        y = reference.rows(h, *weights, counts, probs[:, 0], *biases) + h[:owned]
        y = reference.gemm(y, self.linear.mT, counts)
        return torch.cat([y, y.new_zeros(len(x) - owned, self.OUT) + 0 * h[owned:].sum()])

    def fused(self):
        return [self.fc1, self.fc2] + [p for name, p in self.mlp.named_parameters() if "weight" in name]


def batch(tokens, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, width, generator=generator).to(dtype) for width in (Model.H, Model.OUT))
    ids = torch.randint(0, Model.E, (tokens, Model.K), generator=generator)
    probs = torch.rand(tokens, Model.K, generator=generator).to(dtype)
    counts = torch.bincount(torch.randint(0, Model.E, (tokens - 1,), generator=generator), minlength=Model.E)
    return x.requires_grad_(), ids, probs.requires_grad_(), counts, dy


LOADS = ((9, 1), (9, 2), (12, 3), (16, 4))  # tokens and seed; two micro-batches a step


def train(model, forward, dtype=torch.float32, fused=True):
    """Two steps of two micro-batches, forwards first. Returns outputs and, after each step, gradients in float64."""
    found = {}
    for i, param in enumerate(model.fused() if fused else ()):
        param.main_grad = torch.full_like(param, 0.5 + i, dtype=torch.float32, requires_grad=False)
        if i < 2:
            param.grad_added_to_main_grad = False
    for step in range(2):
        batches = [batch(*load, dtype) for load in LOADS[2 * step : 2 * step + 2]]
        outputs = [forward(*inputs[:-1]) for inputs in batches]
        for i, (y, inputs) in enumerate(zip(outputs, batches, strict=True)):
            y.backward(inputs[-1])
            found |= {f"{name} {step} {i}": t for name, t in (("y", y), ("dx", inputs[0].grad), ("dp", inputs[2].grad))}
        for name, param in model.named_parameters():
            is_fused = hasattr(param, "main_grad")
            if is_fused:
                assert param.grad is None or not param.grad.any()
                assert getattr(param, "grad_added_to_main_grad", True)
            grad = param.main_grad if is_fused else param.grad
            offset = 0.5 + [id(p) for p in model.fused()].index(id(param)) if is_fused else 0.0
            found[f"{name} {step}"] = grad.double() - offset
            with torch.no_grad():
                param -= 0.01 * (grad - offset)
    return {name: t.detach().double() for name, t in found.items()}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_training_a_model_of_every_layer(backend):
    model = Model()
    exact, low, eager = (copy.deepcopy(model) for _ in range(3))
    expected = train(exact.double(), exact.loop, torch.float64, fused=False)
    low_precision = train(low, low.loop, fused=False)
    assert_close(train(eager, eager), expected, low_precision, torch.float32, layers=3)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    assert_close(train(model, compiled), expected, low_precision, torch.float32, layers=3)
    assert counters["stats"]["unique_graphs"] == 1  # for four loads

    x, ids, probs, counts, dy = batch(20, 9)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, ids, probs, counts), model(x, ids, probs, counts))
    copies = {}
    for name, forward in (("eager", model), ("compiled", compiled)):
        y = forward(x, ids, probs, counts)
        with profile(record_shapes=True) as profiled:
            y.backward(dy)
        shapes = [list(param.shape) for param in model.fused()]
        copies[name] = sum(
            event.key in ("aten::clone", "aten::copy_") and bool(event.input_shapes) and event.input_shapes[0] in shapes
            for event in profiled.events()
        )
    assert (copies["compiled"] == copies["eager"]) == (backend == "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("memory", ["", "buffer", "owner"])
def test_new_loads_compile_nothing(memory, dynamic):
    model = Model()
    buffer = fusedmlp.MainGradBuffer(model.fused()) if memory == "buffer" else None
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    graphs = []

    def begin():
        """A new step; an owner has reset the flag, and given each parameter another main_grad."""
        for param in model.parameters():
            param.grad = None
        for param in model.fused() if memory == "owner" else ():
            param.grad_added_to_main_grad, param.main_grad = False, torch.ones_like(param)

    def run(*loads):
        for tokens in loads:
            for seed in (1, 2):
                *inputs, dy = batch(tokens, seed)
                compiled(*inputs).backward(dy)
                graphs.append(counters["stats"]["unique_graphs"])

    begin()
    run(6, 9, 7, 30, 2, 64)
    assert graphs[-1] == graphs[2] <= (1 if dynamic else 2)
    begin()
    run(10)
    assert graphs[-1] == graphs[2]
    del buffer  # kept until here


def test_wrong_counts_raise_when_the_graph_runs():
    model = fusedmlp.GroupedLinear(2, 4, 3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 4)
    torch.testing.assert_close(compiled(x, torch.tensor([2, 3])), model(x, torch.tensor([2, 3])))
    with pytest.raises(ValueError, match="expected a sum of at most 5"):
        compiled(x, torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="expected no negative count"):
        compiled(x, torch.tensor([3, -1]))
    with pytest.raises(RuntimeError, match=r"expected shape \(2,\), a count for each expert; got"):
        compiled(x, torch.tensor([1, 2, 2]))


class Counting(nn.Module):
    """Counts rows of experts by `torch.bincount`, whose length no compiler knows."""

    def __init__(self, mode):
        super().__init__()
        self.mode, E = mode, Model.E
        self.fc1, self.fc2 = nn.Parameter(torch.empty(E, 2 * 5, 8)), nn.Parameter(torch.empty(E, 8, 5))
        self.mlp = fusedmlp.GroupedMLP(E, 8, 6, accumulate_wgrad=mode)
        with torch.no_grad():
            for param, seed in zip(self.parameters(), range(4), strict=True):
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x, ids, probs):
        h = fusedmlp.moe_experts(x, ids, probs, self.fc1, self.fc2, accumulate_wgrad=self.mode)
        return self.mlp(h, torch.bincount(ids[:-1, 0], minlength=Model.E), probs[:, 0])  # the last row is padding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        *[(mode, "aot_eager") for mode in ("off", "grad", "main_grad")],
        pytest.param("main_grad", "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_counts_by_bincount(mode, backend):
    found = []
    for compiles in (False, True):
        model = Counting(mode)
        buffer = fusedmlp.MainGradBuffer(model.parameters()) if mode == "main_grad" else None
        forward = torch.compile(model, fullgraph=True, backend=backend, dynamic=True) if compiles else model
        results = []
        for load in LOADS[:3]:
            x, ids, probs, _, _ = batch(*load)
            y = forward(x, ids, probs)
            y.backward(x.detach().cos())
            results += [y, x.grad, probs.grad]
        found.append(results + [p.grad for p in model.parameters()] if buffer is None else [*results, buffer.flat])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
        assert eager.any()
    assert counters["stats"]["unique_graphs"] == 1
    ids[0, 0] = Model.E + 1
    with pytest.raises((RuntimeError, AssertionError), match=r"Runtime assertion failed|expected size 5==3"):
        forward(x, ids, probs)


def test_counts_as_a_list():
    model = fusedmlp.GroupedLinear(2, 4, 3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for counts in ([2, 3], [1, 4], [3, 2]):
        x = torch.randn(5, 4)
        torch.testing.assert_close(compiled(x, counts), model(x, counts))
    assert counters["stats"]["unique_graphs"] == 1


def test_gradients_in_another_dtype_than_the_parameter():
    model = fusedmlp.GroupedLinear(2, 4, 3, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    x, counts = torch.randn(5, 4, dtype=torch.bfloat16), torch.tensor([2, 3])
    torch.compile(model, fullgraph=True, backend="aot_eager")(x, counts).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    found, model.weight.grad = model.weight.grad, None
    model(x, counts).sum().backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=0.01, atol=0.01)


def test_operators_as_torch_library_sees_them():
    ops = torch.ops.fusedmlp
    weight, main_grad = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    forward = (torch.tensor([0, 1, 2], dtype=torch.int32), [weight], [main_grad], "weight", [1], True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others compare addresses of copies
    assert set(opcheck(ops.enter_forward.default, forward, test_utils=checks).values()) == {"SUCCESS"}
    offsets, keys = ops.enter_forward(*forward)
    assert torch.equal(offsets, forward[0])
    assert keys.tolist() == [[0, main_grad.data_ptr()]]  # 0: frozen
    backward = (torch.ones(2, 3), [main_grad], keys, "weight", [1])
    assert set(opcheck(ops.enter_backward.default, backward).values()) == {"SUCCESS"}
    assert ops.enter_backward(*backward).tolist() == [False]
    for overwrite in (False, True):
        arguments = ([main_grad], torch.tensor([overwrite]))
        assert set(opcheck(ops.zero_where_.default, arguments).values()) == {"SUCCESS"}
        ops.zero_where_(*arguments)
        assert main_grad.any() != overwrite
    weight.requires_grad_()
    with pytest.raises(RuntimeError, match="expects a main_grad attribute"):
        ops.enter_forward(*forward)
    weight.main_grad = main_grad
    _, keys = ops.enter_forward(*forward)
    with pytest.raises(RuntimeError, match="this one must not"):  # no backward runs
        ops.enter_backward(torch.ones(2, 3), [main_grad], keys, "weight", [1])


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_a_number_of_rows_that_depends_on_data_is_batch_invariant(recipe):
    w1, w2 = torch.randn(2, 16, 8), torch.randn(2, 8, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def some(x, mask, counts):
        return fusedmlp.grouped_mlp(x[mask], w1, w2, counts, recipe=recipe, batch_invariant=True)

    x, mask, counts = torch.randn(9, 8), torch.arange(9) % 2 == 0, torch.tensor([2, 3])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y = some(x, mask, counts)
    assert torch.equal(y, fusedmlp.grouped_mlp(x[mask], w1, w2, counts, recipe=recipe, batch_invariant=True))


def test_graphs_are_batch_invariant(compiled_functions):
    """A graph takes x and dy as they lie: operators copy them."""
    layer = invariance.Layer("moe_experts", H=33, F=21)
    every = layer.run()
    for rows, odd in ((slice(None), True), ([77], True), ([77, 3], False)):
        for got, expected in zip(layer.run(rows, odd=odd), every, strict=True):
            assert torch.equal(got, expected[rows])
