"""A layer with a recipe, and options of it that every implementation of 8-bit ones is tested with."""

import torch
from support import eight_bit
from torch.nn import Parameter

import fusedmlp

COUNTS, ROWS, H, F = (130, 0, 200, 5, 1), 340, 256, 128
GPT_OSS = fusedmlp.Activation("swiglu", interleaved=True, limit=7.0, alpha=1.702, linear_offset=1.0)
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
# Sizes that the interpreter is fast with, and numbers that 16 bits do not hold.
SMALL = {
    **{"counts": (19, 0, 1, 34), "rows": 57, "H": 24, "F": 16},
    **{"of": torch.float32, "dtype": torch.float32, "spread": 0, "scale_of_dy": 1.0},
}


class Layer:
    """Experts and a batch, of numbers that the dtype `of` holds, of magnitudes that differ by `spread`.

    Weights have the given dtype, x and dy that of numbers; padding rows hold NaN.
    """

    def __init__(
        self,
        activation="swiglu",
        packed=True,
        layout="out_in",
        probs=True,
        bias=False,
        dtype=torch.bfloat16,
        spread=12,
        F=F,
        device="cpu",
        H=H,
        counts=COUNTS,
        rows=ROWS,
        of=torch.bfloat16,
        scale_of_dy=1e-4,
    ):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape, scale=1.0):
            factors = eight_bit.magnitudes(shape, spread, generator)
            return (torch.randn(*shape, generator=generator) * scale * factors).to(of)

        self.activation = fusedmlp.Activation(activation) if isinstance(activation, str) else activation
        G = 2 * F if self.activation.gated else F
        shapes = [(len(counts), G, H), (len(counts), H, F)]
        self.logical = [normal(*shape, scale=shape[2] ** -0.5) for shape in shapes]
        stored = [(w.mT.contiguous() if layout == "in_out" else w).to(device) for w in self.logical]
        self.params = [[Parameter(w.to(dtype))] if packed else [Parameter(e.to(dtype)) for e in w] for w in stored]
        biases = [normal(*shape[:2], scale=0.1).bfloat16().float() if bias else None for shape in shapes]
        self.biases = [b if b is None else Parameter(b.to(device)) for b in biases]
        self.x, self.dy = normal(rows, H).to(device), normal(rows, H, scale=scale_of_dy).to(device)
        self.x[sum(counts) :] = self.dy[sum(counts) :] = float("nan")
        self.probs = torch.rand(rows, generator=generator).to(device) if probs else None
        self.packed, self.layout, self.counts = packed, layout, list(counts)

    @property
    def weights(self):
        """Weights of fc1 and fc2, as the public functions take them."""
        return [group[0] if self.packed else group for group in self.params]

    def copies(self, recipe):
        return fusedmlp.quantize_weights(*self.weights, recipe, weight_layout=self.layout)

    def __call__(self, x=None, **options):
        biases = dict(zip(("fc1_bias", "fc2_bias"), self.biases, strict=True))
        x = self.x if x is None else x
        options |= {"activation": self.activation, "weight_layout": self.layout, **biases}
        return fusedmlp.grouped_mlp(x, *self.weights, self.counts, probs=self.probs, **options)

    def results(self, **options):
        """y and all gradients, those of weights in float32, with experts packed as `[E, out, in]`."""
        params = [param for group in self.params for param in group]
        buffer = fusedmlp.MainGradBuffer(params)
        x, self.probs = self.x.clone().requires_grad_(), self.probs if self.probs is None else Parameter(self.probs)
        y = self(x, **options)
        y.backward(self.dy)
        if options.get("wgrad_queue") is not None:
            options["wgrad_queue"].run()
        packed = [torch.cat([p.grad.view(-1, *p.shape[-2:]) for p in group]) for group in self.params]
        wgrads = [w.mT if self.layout == "in_out" else w for w in packed]
        found = {"y": y.detach(), "dx": x.grad, "dfc1": wgrads[0], "dfc2": wgrads[1]}
        if self.probs is not None:
            found["dprobs"] = self.probs.grad
        if self.biases[0] is not None:
            found |= {"dbias1": self.biases[0].grad, "dbias2": self.biases[1].grad}
        buffer.zero_grad()
        buffer.detach()
        return {name: t.double().cpu() for name, t in found.items()}

    def expected(self, recipe, wgrad="recipe", fused_bias=False):
        """`results` by float64 products of quantized operands; padding rows are zeros."""
        rows = slice(sum(self.counts))
        probs, *biases = (None if t is None else t.detach().cpu() for t in (self.probs, *self.biases))
        probs = None if probs is None else probs[rows]
        given = self.x[rows].cpu(), self.dy[rows].cpu(), *self.logical, self.counts, probs, *biases, self.activation
        pad = lambda t: torch.cat([t, t.new_zeros(len(self.x) - len(t), *t.shape[1:])])  # noqa: E731
        found = eight_bit.layer(recipe, wgrad, *given, fused_bias)
        return {name: pad(t) if name in ("y", "dx", "dprobs") else t for name, t in found.items()}
