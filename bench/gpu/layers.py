"""Layers for the checks on a GPU, over loads, layouts and modes, and the comparison of their results with float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedmlp

Counts = tuple[int, ...]
LOADS: dict[str, Counts] = {
    "ragged": (130, 1, 0, 257, 64, 0),
    "empty": (0, 0, 0, 0, 0, 0),
    "one": (0, 0, 300, 0, 0, 0),
    "singles": (1, 1, 1, 1, 1, 1),
}
SMALL_LOADS: dict[str, Counts] = {"ragged": (9, 1, 0, 20), "empty": (0, 0, 0, 0)}
PADDING = 5


@dataclass(frozen=True)
class Case:
    """One layer; aligned sizes take the descriptor path where the GPU has one, odd ones the unaligned path."""

    H: int
    F: int
    options: dict[str, object]
    biases: bool = False
    layout: str = "out_in"
    apart: bool = False  # one tensor per expert, each at an address of its own
    misaligned: bool = False  # main_grad starts 4 bytes off
    mode: str = "add"  # "overwrite", "queue", "fused queue"
    top_k: int = 0  # if not 0, moe_experts of tokens with this number of experts each


def cases(small: bool) -> dict[str, Case]:
    """The layers to check, by name."""
    H, F = (32, 16) if small else (512, 256)
    gpt_oss = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "linear_offset": 1.0}
    return {
        "add": Case(H, F, {}),
        "overwrite": Case(H, F, {}, mode="overwrite"),
        "queue": Case(H, F, {}, mode="queue"),
        "fused queue": Case(H, F, {}, mode="fused queue"),
        "gpt-oss": Case(H, F, gpt_oss, biases=True),
        "in_out": Case(H, F, {}, biases=True, layout="in_out"),
        "apart": Case(H, F, {}, biases=True, apart=True),
        "misaligned main_grad": Case(H, F, {}, misaligned=True),
        "odd sizes": Case(H + 1, F + 3, {}, biases=True),
        "tokens": Case(H, F, {}, biases=True, top_k=4),
        "tokens, apart, fused queue": Case(H, F, {}, apart=True, mode="fused queue", top_k=4),
        "tokens, odd sizes": Case(H + 1, F + 3, {}, top_k=3),
        "odd sizes, in_out, apart": Case(H + 1, F + 3, {}, layout="in_out", apart=True),
    }


class Layer:
    """Tensors of a case; padding rows hold NaN, main_grad 0.5, or NaN where it is to be overwritten."""

    def __init__(self, case: Case, counts: Counts, dtype: torch.dtype, device: str) -> None:
        self.case, self.counts, self.dtype = case, counts, dtype
        E, H, F = len(counts), case.H, case.F
        generator = torch.Generator().manual_seed(hash((counts, H, F)) % 2**31)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def padded(t: Tensor) -> Tensor:
            return torch.cat([t, torch.full((PADDING, *t.shape[1:]), float("nan"), dtype=t.dtype)]).to(device)

        rows = sum(counts)
        if case.top_k:
            tokens = -(-(rows + PADDING) // case.top_k)
            self.x, self.dy = (normal(tokens, H).to(device, dtype).requires_grad_(i == 0) for i in range(2))
            self.probs = torch.rand(tokens, case.top_k, generator=generator).to(device).requires_grad_()
        else:
            self.x, self.dy = (padded(normal(rows, H).to(dtype)).requires_grad_(i == 0) for i in range(2))
            self.probs = padded(torch.rand(rows, generator=generator)).requires_grad_()
        weights = (normal(E, 2 * F, H) * H**-0.5, normal(E, H, F) * F**-0.5)
        if case.layout == "in_out":
            weights = (weights[0].mT.contiguous(), weights[1].mT.contiguous())
        self.weights = [self._split(w.to(device, dtype)) for w in weights]
        self.biases = [self._split(normal(E, n).to(device, dtype)) for n in (2 * F, H)] if case.biases else [[], []]
        self.initial = 0.0 if case.mode == "overwrite" else 0.5
        for param in itertools.chain(*self.weights):
            start = float("nan") if case.mode == "overwrite" else self.initial
            flat = torch.full((param.numel() + 1,), start, device=device)
            param.main_grad = flat[int(case.misaligned) :][: param.numel()].view(param.shape)
        self.count_tensor = torch.tensor(counts, device=device)
        self.ids = torch.empty(self.probs.shape, dtype=torch.int64, device=device)
        self.load(counts)

    def load(self, counts: Counts) -> None:
        """Give experts other numbers of rows. The remaining choices of tokens are experts elsewhere, -1."""
        self.count_tensor.copy_(torch.tensor(counts))
        experts = torch.full((self.ids.numel(),), -1)
        experts[: sum(counts)] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        mixed = torch.randperm(experts.numel(), generator=torch.Generator().manual_seed(0))
        self.ids.copy_(experts[mixed].view(self.ids.shape))

    def _split(self, packed: Tensor) -> list[Parameter]:
        return [Parameter(t.clone()) for t in packed] if self.case.apart else [Parameter(packed)]

    def forward(self, queue: fusedmlp.WgradQueue | None = None, impl: str = "auto") -> Tensor:
        """Call the public function."""
        w1, w2, b1, b2 = (
            group if self.case.apart else group[0] if group else None for group in (*self.weights, *self.biases)
        )
        options = {
            "fc1_bias": b1 or None if self.case.apart else b1,
            "fc2_bias": b2 or None if self.case.apart else b2,
            "activation": fusedmlp.Activation("swiglu", **self.case.options),
            "weight_layout": self.case.layout,
            "wgrad_queue": queue,
            "is_first_microbatch": self.case.mode == "overwrite",
            "impl": impl,
        }
        if self.case.top_k:
            return fusedmlp.moe_experts(self.x, self.ids, self.probs, w1, w2, **options)
        return fusedmlp.grouped_mlp(self.x, w1, w2, self.count_tensor, probs=self.probs, **options)

    def run(self, impl: str = "auto") -> dict[str, Tensor]:
        """Forward and backward, twice where a queue is to fuse two micro-batches."""
        self.microbatches = 2 if self.case.mode == "fused queue" else 1
        queue = None
        if "queue" in self.case.mode:
            queue = fusedmlp.WgradQueue(fuse_microbatches=self.case.mode == "fused queue")
        for _ in range(self.microbatches):
            self.x.grad = self.probs.grad = None
            for param in itertools.chain(*self.biases):
                param.grad = None
            y = self.forward(queue, impl)
            y.backward(self.dy)
        if queue is not None:
            queue.run()
        results = {"y": y.detach(), "dx": self.x.grad, "dprobs": self.probs.grad}
        for name, group in zip(("fc1", "fc2"), self.weights, strict=True):
            results[name] = self._joined([p.main_grad for p in group])
        for name, group in zip(("bias1", "bias2"), self.biases, strict=True):
            if group:
                results[name] = self._joined([p.grad for p in group])
        return results

    def _joined(self, group: list[Tensor]) -> Tensor:
        return torch.stack(group) if self.case.apart else group[0]

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The results of `run` by plain autograd, expert by expert, in `dtype`."""
        transposed = self.case.layout == "in_out"
        params = [self._joined([p.detach() for p in g]).to(dtype).requires_grad_() for g in self.weights]
        biases = [self._joined([p.detach() for p in g]).to(dtype).requires_grad_() for g in self.biases if g]
        x, probs = (t.detach().to(dtype).requires_grad_() for t in (self.x, self.probs))
        w1, w2 = (p.mT if transposed else p for p in params)
        slots = torch.arange(probs.numel(), device=x.device)  # of rows, sorted by expert
        if self.case.top_k:
            slots = self.ids.where(self.ids >= 0, len(self.counts)).flatten().argsort(stable=True)
        tokens = slots // max(1, self.case.top_k)
        x_rows, probs_rows = x[tokens], probs.flatten()[slots]
        pieces, row = [], 0
        for e, n in enumerate(self.counts):
            part = slice(row, row + n)
            h = x_rows[part] @ w1[e].T
            if biases:
                h = h + biases[0][e]
            out = self._activation(h) @ w2[e].T
            if biases:
                out = out + biases[1][e]
            pieces.append(out * probs_rows[part, None])
            row += n
        y = torch.zeros_like(x).index_add(0, tokens[:row], torch.cat(pieces))
        y.backward(self.dy.to(dtype))
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, probs, *params, *biases)]
        results = dict(zip(("dx", "dprobs", "fc1", "fc2", "bias1", "bias2"), grads, strict=False))
        for name in ("fc1", "fc2"):
            results[name] = self.microbatches * results[name].double() + self.initial
        return {"y": y.detach(), **results}

    def _activation(self, h: Tensor) -> Tensor:
        options = self.case.options
        gate, linear = (h[:, ::2], h[:, 1::2]) if options.get("interleaved") else h.chunk(2, dim=1)
        if limit := options.get("limit"):
            gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * options.get("alpha", 1.0)) * (linear + options.get("linear_offset", 0.0))


def compare(layer: Layer, results: dict[str, Tensor]) -> float:
    """Largest relative error (2-norm) of any result.

    Raises if an error is over twice that of plain autograd in the dtype, plus one rounding.
    """
    exact, plain = layer.reference(torch.float64), layer.reference(layer.dtype)
    band = torch.finfo(layer.dtype).eps / 2  # one rounding
    worst = 0.0
    for name, want in exact.items():
        got = results[name].double()
        if got.shape != want.shape or not torch.isfinite(got).all():
            raise AssertionError(f"{name}: shape {tuple(got.shape)}, or not finite")
        scale = want.norm().clamp(min=1e-30)
        error, allowed = ((t - want).norm() / scale for t in (got, plain[name].double()))
        if error > 2 * (allowed + band):
            raise AssertionError(f"{name}: error {error:.2e}, of plain autograd {allowed:.2e}")
        worst = max(worst, float(error))
    return worst
