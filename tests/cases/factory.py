"""Makes the inputs of all numerical tests, and runs the library on them."""

import random
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

import fusedmlp
from bench.oracle import reference as oracle
from fusedmlp.activation import KINDS

GATED = tuple(name for name, kind in KINDS.items() if kind.gated)
UNGATED = tuple(name for name, kind in KINDS.items() if not kind.gated)


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...] = (3, 0, 5, 1)
    padding: int = 2
    H: int = 8
    F: int = 6
    activation: str = "swiglu"
    options: dict = field(default_factory=dict)
    layout: str = "out_in"
    packed: bool = True
    bias: bool = False
    probs: bool = True
    dtype: torch.dtype = torch.float32
    main_grad_dtype: torch.dtype = torch.float32
    delayed: bool = False
    overwrite: bool = False
    seed: int = 0

    @property
    def gated(self):
        return self.activation in GATED


def random_case(seed):
    """A case drawn uniformly over everything that the public function takes."""
    rng = random.Random(seed)
    name = rng.choice(GATED + UNGATED)
    options = {}
    if name in GATED and rng.random() < 0.5:
        options = {
            "interleaved": rng.random() < 0.5,
            "limit": rng.choice([None, 0.7]),
            "linear_offset": rng.choice([0.0, 1.0]),
        }
    if KINDS[name].alpha is not None and rng.random() < 0.3:
        options["alpha"] = 1.3
    if KINDS[name].linear_scale is not None and rng.random() < 0.7:
        options["linear_scale"] = 2.5
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    experts = rng.randint(1, 6)
    load = rng.choice(["ragged", "single", "empty", "skewed", "uniform"])
    counts = {
        "ragged": [rng.randint(0, 21) for _ in range(experts)],
        "single": [rng.randint(0, 1) for _ in range(experts)],
        "empty": [0] * experts,
        "skewed": [0] * (experts - 1) + [37],
        "uniform": [rng.randint(1, 9)] * experts,
    }[load]
    return Case(
        counts=tuple(counts),
        padding=rng.choice([0, 0, 1, 19]),
        H=rng.choice([1, 7, 16, 33, 40]),
        F=rng.choice([1, 5, 16, 35]),
        activation=name,
        options=options,
        layout=rng.choice(["out_in", "in_out"]),
        packed=rng.random() < 0.5,
        bias=rng.random() < 0.5,
        probs=rng.random() < 0.7,
        dtype=dtype,
        main_grad_dtype=rng.choice([torch.float32, dtype]),
        delayed=rng.random() < 0.3,
        overwrite=rng.random() < 0.3,
        seed=seed,
    )


class Inputs:
    """Tensors of a case. Padding rows hold NaN, and main_grad starts from something that is not zero."""

    def __init__(self, case):
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        E, rows = len(case.counts), sum(case.counts)
        G = 2 * case.F if case.gated else case.F

        def normal(*shape, scale=1.0, dtype=case.dtype):
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        def stored(out_features, in_features):
            shape = (out_features, in_features) if case.layout == "out_in" else (in_features, out_features)
            return normal(E, *shape, scale=in_features**-0.5)

        def padded(t):
            return torch.cat([t, torch.full((case.padding, *t.shape[1:]), float("nan"), dtype=t.dtype)])

        self.x, self.dy = padded(normal(rows, case.H)), padded(normal(rows, case.H))
        self.probs = padded(torch.rand(rows, generator=generator))
        self.fc1, self.fc2 = stored(G, case.H), stored(case.H, case.F)
        self.bias1, self.bias2 = normal(E, G), normal(E, case.H)
        self.initial_main_grad = 0.0 if case.overwrite else 0.5

    def tensors(self):
        """The tensors that get a gradient, by name."""
        names = ["x", "fc1", "fc2"] + ["probs"] * self.case.probs + ["bias1", "bias2"] * self.case.bias
        return {name: getattr(self, name) for name in names}


def run(inputs, impl, device="cpu"):
    """Forward and backward through the library: y, dx, dprobs, bias gradients, main_grad of both weights."""
    case = inputs.case
    params = {}
    for name in ("fc1", "fc2", "bias1", "bias2"):
        tensor = getattr(inputs, name).clone().to(device)
        params[name] = [Parameter(tensor)] if case.packed else [Parameter(t.clone()) for t in tensor]
    buffer = fusedmlp.MainGradBuffer(params["fc1"] + params["fc2"], dtype=case.main_grad_dtype)
    buffer.flat.fill_(float("nan") if case.overwrite else inputs.initial_main_grad)
    if case.overwrite:
        buffer.zero_grad()
    argument = {name: group[0] if case.packed else group for name, group in params.items()}
    x = inputs.x.clone().to(device).requires_grad_()
    probs = inputs.probs.clone().to(device).requires_grad_() if case.probs else None
    queue = fusedmlp.WgradQueue() if case.delayed else None
    y = fusedmlp.grouped_mlp(
        x,
        argument["fc1"],
        argument["fc2"],
        torch.tensor(case.counts, device=device),
        probs=probs,
        fc1_bias=argument["bias1"] if case.bias else None,
        fc2_bias=argument["bias2"] if case.bias else None,
        activation=fusedmlp.Activation(case.activation, **case.options),
        weight_layout=case.layout,
        accumulate_wgrad="main_grad",
        wgrad_queue=queue,
        impl=impl,
    )
    y.backward(inputs.dy.to(device))
    if queue is not None:
        queue.run()

    def gathered(group, attribute):
        tensors = [getattr(p, attribute) for p in group]
        return tensors[0] if case.packed else torch.stack(tensors)

    results = {"y": y.detach(), "dx": x.grad, "dfc1": gathered(params["fc1"], "main_grad")}
    results["dfc2"] = gathered(params["fc2"], "main_grad")
    if case.probs:
        results["dprobs"] = probs.grad
    if case.bias:
        results["dbias1"], results["dbias2"] = (gathered(params[n], "grad") for n in ("bias1", "bias2"))
    return {name: t.cpu().double() for name, t in results.items()}


def reference(inputs, dtype, magnitudes=None):
    """The same results by the oracle, computed in `dtype`."""
    case = inputs.case
    return oracle.grouped_mlp(
        inputs.tensors(),
        case.counts,
        inputs.dy,
        dtype,
        layout=case.layout,
        before=inputs.initial_main_grad,
        magnitudes=magnitudes,
        activation=case.activation,
        **case.options,
    )


@dataclass(frozen=True)
class Segment:
    """Operands of one weight gradient: rows of expert 0 first, and padding rows of NaN."""

    dy: torch.Tensor
    x: torch.Tensor
    offsets: torch.Tensor

    def product(self, dtype):
        """`dy^T x` of every expert, computed in `dtype`."""
        return oracle.wgrad(self.dy.to(dtype), self.x.to(dtype), self.offsets.diff().tolist())

    def scale(self):
        """A probability for each row, NaN for padding rows."""
        scale = torch.rand(self.dy.shape[0], generator=torch.Generator().manual_seed(3)) + 0.5
        scale[int(self.offsets[-1]) :] = float("nan")
        return scale.to(self.dy.device)


def wgrad_segment(counts, N=40, K=72, dtype=torch.float32, padding=3, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts)

    def operand(columns):
        values = torch.randn(rows + padding, columns, generator=generator).to(dtype)
        values[rows:] = float("nan")
        return values.to(device)

    offsets = torch.tensor([sum(counts[:e]) for e in range(len(counts) + 1)], dtype=torch.int32, device=device)
    return Segment(operand(N), operand(K), offsets)
