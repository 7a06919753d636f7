"""Inputs for `moe_experts`, a run of the library on them, and the reference: a loop over tokens and their choices."""

import random
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

import fusedmlp
from bench.oracle import reference as oracle
from cases.factory import GATED, UNGATED

WEIGHTS, BIASES = ("fc1", "fc2"), ("bias1", "bias2")
MODES = ("main_grad", "overwrite", "grad", "no grad yet", "off")


@dataclass(frozen=True)
class Case:
    T: int = 7
    K: int = 3
    E: int = 4
    H: int = 8
    F: int = 6
    ids: str = "random"  # or "outside", "one expert", "one choice"
    activation: str = "swiglu"
    options: dict = field(default_factory=dict)
    layout: str = "out_in"
    packed: bool = True
    bias: bool = False
    dtype: torch.dtype = torch.float32
    weights_dtype: torch.dtype = torch.float32  # of top_k_weights
    main_grad_dtype: torch.dtype = torch.float32
    mode: str = "main_grad"
    queue: str = "none"  # or "delayed", "fused"
    microbatches: int = 1
    seed: int = 0


def random_case(seed):
    """A case drawn uniformly over everything that the public function takes."""
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    return Case(
        T=rng.choice([0, 1, 2, 7, 13]),
        K=rng.randint(1, 4),
        E=rng.randint(1, 6),
        H=rng.choice([1, 7, 16, 33]),
        F=rng.choice([1, 5, 16]),
        ids=rng.choice(["random", "random", "random", "outside", "one expert", "one choice"]),
        activation=rng.choice(GATED + UNGATED),
        layout=rng.choice(["out_in", "in_out"]),
        packed=rng.random() < 0.5,
        bias=rng.random() < 0.5,
        dtype=dtype,
        weights_dtype=rng.choice([torch.float32, dtype]),
        main_grad_dtype=rng.choice([torch.float32, dtype]),
        mode=rng.choice(MODES),
        queue=rng.choice(["none", "delayed", "fused"]),
        microbatches=rng.randint(1, 3),
        seed=seed,
    )


@dataclass
class Microbatch:
    x: torch.Tensor  # [T, H]; NaN for tokens without an expert here
    ids: torch.Tensor  # [T, K]; -2 to E + 1
    probs: torch.Tensor  # [T, K]; NaN where the expert is elsewhere
    dy: torch.Tensor  # [T, H]


class Inputs:
    """Tensors of a case."""

    def __init__(self, case):
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        E, H, F = case.E, case.H, case.F
        G = 2 * F if case.activation in GATED else F

        def normal(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator) * scale).to(case.dtype)

        def stored(out_features, in_features):
            shape = (out_features, in_features) if case.layout == "out_in" else (in_features, out_features)
            return normal(E, *shape, scale=in_features**-0.5)

        self.weights = {"fc1": stored(G, H), "fc2": stored(H, F), "bias1": normal(E, G), "bias2": normal(E, H)}
        self.microbatches = []
        for _ in range(case.microbatches):
            ids = {
                "random": torch.randint(-2, E + 2, (case.T, case.K), generator=generator),
                "outside": torch.tensor([-1, E]).expand(max(case.T, case.K), 2)[: case.T, :1].repeat(1, case.K),
                "one expert": torch.full((case.T, case.K), E - 1),
                "one choice": torch.arange(case.K).eq(case.K - 1).long().sub(1).repeat(case.T, 1),
            }[case.ids]
            x, dy = normal(case.T, H), normal(case.T, H)
            probs = torch.rand(case.T, case.K, generator=generator).to(case.weights_dtype)
            here = (ids >= 0) & (ids < E)
            x[~here.any(1)] = float("nan")
            probs[~here] = float("nan")
            self.microbatches.append(Microbatch(x, ids, probs, dy))

    @property
    def before(self):
        """The value of every element of `main_grad` or `.grad` before a run that adds to it; 0 if none adds."""
        return 0.5 if self.case.mode in ("main_grad", "grad") else 0.0


def run(inputs, impl, device="cpu"):
    """Forward and backward through the library, for every micro-batch, then the queue."""
    case, params, of_tokens = inputs.case, {}, []
    for name, tensor in inputs.weights.items():
        params[name] = [Parameter(t.clone().to(device)) for t in ([tensor] if case.packed else tensor)]
    for param in params["fc1"] + params["fc2"]:
        if case.mode in ("main_grad", "overwrite"):
            start = float("nan") if case.mode == "overwrite" else inputs.before
            param.main_grad = torch.full_like(param, start, dtype=case.main_grad_dtype, requires_grad=False)
        elif case.mode == "grad":
            param.grad = torch.full_like(param, inputs.before)
    arguments = {name: group[0] if case.packed else group for name, group in params.items()}
    queue = None if case.queue == "none" else fusedmlp.WgradQueue(fuse_microbatches=case.queue == "fused")
    for i, batch in enumerate(inputs.microbatches):
        for param in params["fc1"] + params["fc2"]:
            param.overwrite_main_grad = case.mode == "overwrite" and i == 0
        x, probs = (t.clone().to(device).requires_grad_() for t in (batch.x, batch.probs))
        y = fusedmlp.moe_experts(
            x,
            batch.ids.to(device),
            probs,
            arguments["fc1"],
            arguments["fc2"],
            fc1_bias=arguments["bias1"] if case.bias else None,
            fc2_bias=arguments["bias2"] if case.bias else None,
            activation=fusedmlp.Activation(case.activation, **case.options),
            weight_layout=case.layout,
            accumulate_wgrad={"overwrite": "main_grad", "no grad yet": "grad"}.get(case.mode, case.mode),
            wgrad_queue=queue,
            impl=impl,
        )
        y.backward(batch.dy.to(device))
        of_tokens.append((y.detach(), x.grad, probs.grad))
    if queue is not None:
        queue.run()
    results = _concatenated(of_tokens)
    attribute = "main_grad" if case.mode in ("main_grad", "overwrite") else "grad"
    for name in WEIGHTS:
        results[name] = _joined([getattr(p, attribute) for p in params[name]], case.packed)
    for name in BIASES if case.bias else ():
        results[name] = _joined([p.grad for p in params[name]], case.packed)
    return {name: t.cpu().double() for name, t in results.items()}


def _concatenated(of_tokens):
    """Results of all micro-batches in one tensor each: a small one is not compared by its own largest value."""
    return dict(zip(("y", "dx", "dprobs"), map(torch.cat, zip(*of_tokens, strict=True)), strict=True))


def _joined(tensors, packed):
    return tensors[0] if packed else torch.stack(tensors)


def reference(inputs, dtype):
    """The same results from plain autograd in `dtype`, one token and one choice at a time."""
    case, of_tokens = inputs.case, []
    leaf = {name: t.to(dtype, copy=True).requires_grad_() for name, t in inputs.weights.items()}
    fc1, fc2 = (leaf[n] if case.layout == "out_in" else leaf[n].mT for n in WEIGHTS)

    def expert(e, x, probs):
        biases = {name: leaf[name][e] for name in BIASES * case.bias}
        return oracle.expert(x, fc1[e], fc2[e], probs, activation=case.activation, **biases, **case.options).y

    for batch in inputs.microbatches:
        x, probs = (t.to(dtype, copy=True).requires_grad_() for t in (batch.x, batch.probs))
        y = torch.zeros(case.T, case.H, dtype=dtype)
        for t, ids in enumerate(batch.ids.tolist()):
            for k, e in enumerate(ids):
                if 0 <= e < case.E:
                    term = expert(e, x[t : t + 1], probs[t, k : k + 1])
                    y = y + torch.zeros_like(y).index_add(0, torch.tensor([t]), term)
        if y.requires_grad:
            y.backward(batch.dy.to(dtype))
        of_tokens.append((y.detach(), _grad(x), _grad(probs)))
    results = _concatenated(of_tokens) | {name: _grad(leaf[name]) for name in WEIGHTS + BIASES * case.bias}
    for name in WEIGHTS:
        results[name] = results[name].double() + inputs.before
    return {name: t.double() for name, t in results.items()}


def _grad(tensor):
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
