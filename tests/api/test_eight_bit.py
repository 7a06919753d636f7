"""8-bit recipes with `impl="torch"`, against float64 layers of quantized operands, and what is refused."""

import pytest
import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.doctor import reference
from fusedmlp.operators.torch_quantize import quantize

RECIPES = {"fp8_block": 128, "mxfp8": 32}
COUNTS, ROWS, H, F = (130, 0, 200, 5, 1), 340, 256, 128
GPT_OSS = fusedmlp.Activation("swiglu", interleaved=True, limit=7.0, alpha=1.702, linear_offset=1.0)
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
]


def dequantized(x, recipe, block):
    return quantize(x.float(), recipe, block).dequantize(block)


def along_rows(x, recipe):
    """Operands of fc1, fc2, dgrad and dx: blocks of a row."""
    return dequantized(x, recipe, (1, RECIPES[recipe]))


def along_tokens(x, recipe):
    """Operands of wgrad: blocks of a column, which begin anew in each expert."""
    parts = x[: sum(COUNTS)].split(COUNTS)
    return torch.cat([dequantized(part, recipe, (RECIPES[recipe], 1)) for part in parts if len(part)])


def weight(w, recipe, contracted):
    """`[E, N, K]`, contracted along dimension 1 or 2."""
    if recipe == "fp8_block":
        return dequantized(w, recipe, (128, 128))
    return dequantized(w, recipe, (32, 1) if contracted == 1 else (1, 32))


class Layer:
    """Experts and a batch in bf16; padding rows hold NaN.

    With scales that are powers of two, an element is the same in any block but for those of much larger elements. So
    every row and every column of each tensor has an exponent of its own, down to -`spread`.
    """

    def __init__(
        self, activation="swiglu", packed=True, layout="out_in", probs=True, bias=False, dtype=torch.bfloat16, spread=12
    ):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape, scale=1.0):
            lines = [(*shape[:-1], 1), (*shape[:-2], 1, shape[-1])]
            exponents = sum(torch.randint(spread + 1, line, generator=generator) for line in lines)
            return (torch.randn(*shape, generator=generator) * scale * 2.0**-exponents).bfloat16()

        self.activation = fusedmlp.Activation(activation) if isinstance(activation, str) else activation
        G = 2 * F if self.activation.gated else F
        shapes = [(len(COUNTS), G, H), (len(COUNTS), H, F)]
        self.logical = [normal(*shape, scale=shape[2] ** -0.5) for shape in shapes]
        stored = [w.mT.contiguous() if layout == "in_out" else w for w in self.logical]
        self.params = [[Parameter(w.to(dtype))] if packed else [Parameter(e.to(dtype)) for e in w] for w in stored]
        self.biases = [Parameter(normal(*shape[:2], scale=0.1).float()) if bias else None for shape in shapes]
        self.x, self.dy = normal(ROWS, H), normal(ROWS, H, scale=1e-4)
        self.x[sum(COUNTS) :] = self.dy[sum(COUNTS) :] = float("nan")
        self.probs = torch.rand(ROWS, generator=generator) if probs else None
        self.packed, self.layout = packed, layout

    def __call__(self, x=None, **options):
        weights = [group[0] if self.packed else group for group in self.params]
        biases = dict(zip(("fc1_bias", "fc2_bias"), self.biases, strict=True))
        x = self.x if x is None else x
        options |= {"activation": self.activation, "weight_layout": self.layout, **biases}
        return fusedmlp.grouped_mlp(x, *weights, list(COUNTS), probs=self.probs, **options)

    def results(self, microbatches=1, **options):
        """y and all gradients, those of weights from float32 main_grads, with experts packed as `[E, out, in]`."""
        params = [param for group in self.params for param in group]
        buffer = fusedmlp.MainGradBuffer(params)
        buffer.zero_()
        x, self.probs = self.x.clone().requires_grad_(), self.probs if self.probs is None else Parameter(self.probs)
        for _ in range(microbatches):
            y = self(x, **options)
            y.backward(self.dy)
        if options.get("wgrad_queue") is not None:
            options["wgrad_queue"].run()
        packed = [torch.cat([p.main_grad.view(-1, *p.shape[-2:]) for p in group]) for group in self.params]
        wgrads = [w.mT if self.layout == "in_out" else w for w in packed]
        found = {"y": y.detach(), "dx": x.grad, "dfc1": wgrads[0], "dfc2": wgrads[1]}
        if self.probs is not None:
            found["dprobs"] = self.probs.grad
        if self.biases[0] is not None:
            found |= {"dbias1": self.biases[0].grad, "dbias2": self.biases[1].grad}
        buffer.detach()
        return {name: t.double() for name, t in found.items()}

    def expected(self, recipe, wgrad="recipe"):
        """`results` by float64 products of quantized operands, with roundings to bf16 where tensors are stored."""
        rows, bf16 = slice(sum(COUNTS)), lambda t: t.bfloat16().double()
        fc1, fc2 = (w.double() for w in self.logical)
        x, dy = self.x[rows].double(), self.dy[rows].double()
        p = torch.ones(len(x), dtype=torch.double) if self.probs is None else self.probs[rows].detach().double()
        p, counts = p[:, None], torch.tensor(COUNTS)
        bias1, bias2 = (None if b is None else b.double().repeat_interleave(counts, 0).detach() for b in self.biases)
        h = reference.gemm(along_rows(x, recipe), weight(fc1, recipe, 2), COUNTS)
        h = bf16(h if bias1 is None else bf16(h) + bias1).requires_grad_()
        act = reference.activate(self.activation.name, h, **_options(self.activation))
        act_probs = bf16(act.detach() * p)
        y = reference.gemm(along_rows(act_probs, recipe), weight(fc2, recipe, 2), COUNTS)
        y = bf16(y if bias2 is None else bf16(y) + p * bias2)
        da = bf16(reference.gemm(along_rows(dy, recipe), weight(fc2, recipe, 1).mT, COUNTS))
        (dh,) = torch.autograd.grad(act, h, da * p)
        dh = bf16(dh)
        found = {"y": y, "dx": bf16(reference.gemm(along_rows(dh, recipe), weight(fc1, recipe, 1).mT, COUNTS))}
        quantized = (lambda t: along_tokens(t, recipe)) if wgrad == "recipe" else (lambda t: t)
        found["dfc1"] = reference.wgrad(quantized(dh), quantized(x), COUNTS)
        found["dfc2"] = reference.wgrad(quantized(dy), quantized(act_probs), COUNTS)
        found["dprobs"] = (da * act.detach()).sum(1) + (0 if bias2 is None else (dy * bias2).sum(1))
        if bias1 is not None:
            found["dbias1"] = torch.stack([part.sum(0) for part in dh.split(COUNTS)])
            found["dbias2"] = torch.stack([part.sum(0) for part in (dy * p).split(COUNTS)])
        padded = {"y", "dx", "dprobs"}
        pad = lambda t: torch.cat([t, t.new_zeros(ROWS - len(t), *t.shape[1:])])  # noqa: E731
        return {name: pad(t.detach()) if name in padded else t.detach() for name, t in found.items()}


def _options(activation):
    options = {"interleaved": activation.interleaved, "limit": activation.limit, "alpha": activation.alpha}
    return options | {"linear_offset": activation.linear_offset}


def distances(got, expected):
    return {name: float((t - expected[name]).norm() / expected[name].norm()) for name, t in got.items()}


def worst_line(got, expected):
    """The largest distance of a row, or a column, of any expert; lines that are zero must be equal."""
    worst = 0.0
    for name, t in got.items():
        for dim in range(max(t.dim() - 2, 0), t.dim()):
            error, size = (t - expected[name]).norm(dim=dim), expected[name].norm(dim=dim)
            assert not error[size == 0].any(), name
            worst = max(worst, float((error / size)[size > 0].max()))
    return worst


# A value of h that another order of summation rounds the other way changes it by 2^-8, and few do: little of the whole,
# but perhaps one of the large elements of a row.
ALLOWED, ALLOWED_OF_A_LINE = 1e-4, 2**-9
LAYERS = {
    "swiglu": {},
    "list of experts": {"packed": False},
    "in_out": {"layout": "in_out"},
    "float32 weights": {"dtype": torch.float32},
    "biases": {"bias": True},
    "no probs": {"probs": False},
    "relu2": {"activation": "relu2"},
    "gpt-oss": {"activation": GPT_OSS, "bias": True},
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer(recipe, wgrad, kind):
    layer = Layer(**LAYERS[kind])
    got = layer.results(recipe=recipe, wgrad=wgrad)
    found = distances(got, layer.expected(recipe, wgrad))
    assert all(distance < ALLOWED for distance in found.values()), found
    assert worst_line(got, layer.expected(recipe, wgrad)) < ALLOWED_OF_A_LINE
    assert not got["y"][sum(COUNTS) :].any()
    assert not got["dfc1"][1].any()  # no rows
    assert got["dfc1"][4].any()  # one row
    other = distances(got, layer.expected(recipe, "bf16" if wgrad == "recipe" else "recipe"))
    assert other["dfc1"] > 0.01 < other["dfc2"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_wgrad_sums_quantized_operands_without_rounding(recipe):
    layer, queue = Layer(), fusedmlp.WgradQueue()
    layer(recipe=recipe, wgrad_queue=queue).backward(layer.dy)
    operands = [(delayed.operands.dy, delayed.operands.x) for delayed in queue._pending]
    queue.run()
    assert {group[0].grad.dtype for group in layer.params} == {torch.bfloat16}
    got = Layer().results(recipe=recipe)
    for name, (dy, x) in zip(("dfc2", "dfc1"), operands, strict=True):
        exact = reference.wgrad(along_tokens(dy, recipe), along_tokens(x, recipe), COUNTS)
        assert distances({name: got[name]}, {name: exact})[name] < 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
def test_error_beside_values_that_are_not_quantized(recipe):
    """The whole quantization error, about 7%; without quantization it would be below 1%."""
    found = distances(Layer(spread=0).results(recipe=recipe), Layer(spread=0).results(recipe="bf16"))
    assert all(0.02 < distance < 0.12 for distance in found.values()), found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["delayed", "fused microbatches", "checkpoint", "compiled", "x in float32"])
def test_is_the_same_however_it_is_run(how, recipe):
    expected = Layer().results(recipe=recipe)
    layer, options = Layer(), {"recipe": recipe}
    if how in ("delayed", "fused microbatches"):
        options["wgrad_queue"] = fusedmlp.WgradQueue(fuse_microbatches=how == "fused microbatches")
    elif how == "x in float32":
        layer.x, layer.dy = layer.x.float(), layer.dy.float()
    elif how == "checkpoint":
        call = layer.__class__.__call__
        layer = type(
            "Checkpointed", (Layer,), {"__call__": lambda *a, **o: checkpoint(call, *a, **o, use_reentrant=False)}
        )()
    elif how == "compiled":
        call = torch.compile(Layer.__call__, backend="aot_eager", fullgraph=True)
        layer = type("Compiled", (Layer,), {"__call__": lambda *a, **o: call(*a, **o)})()
        layer.x, layer.dy = torch.nan_to_num(layer.x), torch.nan_to_num(layer.dy)
    for name, got in layer.results(**options).items():
        assert torch.equal(got, expected[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_and_one_linear_layer(recipe):
    torch.manual_seed(0)
    E, T = 3, 128
    fc1, fc2 = (Parameter((torch.randn(E, *s) / 16).bfloat16()) for s in ((2 * F, H), (H, F)))
    x, probs = torch.randn(T, H).bfloat16().requires_grad_(), torch.rand(T, 2)
    index = torch.stack([torch.randperm(E)[:2] for _ in range(T)])
    y = fusedmlp.moe_experts(x, index, probs, fc1, fc2, recipe=recipe)
    y.sum().backward()
    order = index.flatten().argsort(stable=True)
    rows, counts = x.detach()[order // 2].requires_grad_(), index.flatten().bincount(minlength=E)
    weights = [Parameter(w.detach().clone()) for w in (fc1, fc2)]
    each = fusedmlp.grouped_mlp(rows, *weights, counts, probs=probs.flatten()[order], recipe=recipe)
    each.sum().backward()
    summed = torch.zeros(T, H).index_add_(0, order // 2, each.float())
    assert distances({"y": y.detach().double()}, {"y": summed.detach().double()})["y"] < 2**-8
    for mine, other in zip((fc1, fc2), weights, strict=True):
        assert torch.equal(mine.grad, other.grad)
    y = fusedmlp.grouped_linear(rows, fc1, counts, recipe=recipe)
    exact = reference.gemm(along_rows(rows.detach(), recipe), weight(fc1.detach(), recipe, 2), counts.tolist())
    assert distances({"y": y.detach().double()}, {"y": exact})["y"] < 2**-8
    fc1.grad = None
    y.backward(torch.ones_like(y))
    assert fc1.grad.any()


def test_few_rows_stay_in_16_bits():
    weights = [Parameter(torch.randn(4, *s) / 16) for s in ((2 * F, H), (H, F))]
    for rows, same in ((255, True), (256, False)):
        x, counts = torch.randn(rows, H), [rows, 0, 0, 0]
        y, bf16 = (fusedmlp.grouped_mlp(x, *weights, counts, recipe=recipe) for recipe in ("mxfp8", "bf16"))
        assert torch.equal(y, bf16) is same


@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
def test_exported_program(wgrad, kind):
    options = {"recipe": "mxfp8", "wgrad": wgrad, "dtype": torch.bfloat16}
    make = fusedmlp.GroupedMLP if kind == "mlp" else fusedmlp.GroupedLinear
    module, x, counts = make(2, H, F, **options), torch.randn(160, H).bfloat16(), torch.tensor([60, 100])
    program = torch.export.export(module, (x, counts)).module()
    x.requires_grad_()
    results = []
    for run in (program, module):
        y = run(x, counts)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    assert all(map(torch.equal, *results))


def test_errors():
    layer = Layer()
    with pytest.raises(NotImplementedError, match=r"recipe='mxfp8': expected a GPU with kernels for it .*, or impl="):
        layer(recipe="mxfp8", impl="triton")
    with pytest.raises(TypeError, match=r"x: expected dtype torch.bfloat16 or torch.float32 .*; got torch.float16"):
        layer(layer.x.half(), recipe="mxfp8")
    for recipe in (None, "fp16"):
        with pytest.raises(
            ValueError, match=r"wgrad=\"bf16\": expected a recipe that computes in bfloat16; got recipe="
        ):
            layer(recipe=recipe, wgrad="bf16")
    with pytest.raises(ValueError, match=r"wgrad: expected one of 'recipe', 'bf16'; got 'fp32'"):
        layer(recipe="mxfp8", wgrad="fp32")
    w = torch.zeros(2, 96, 80)
    with pytest.raises(ValueError, match=r"weight: expected multiples of 32 features, .*; got 96 out and 80 in"):
        fusedmlp.grouped_linear(torch.zeros(4, 80), w, [2, 2], recipe="mxfp8")
    with pytest.raises(ValueError, match=r"weight: expected multiples of 128 features, .*; got 96 out and 128 in"):
        fusedmlp.grouped_linear(torch.zeros(4, 128), torch.zeros(2, 96, 128), [2, 2], recipe="fp8_block")
