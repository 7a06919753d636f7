"""Layers for the checks on a GPU, over loads, layouts and modes, and the comparison of their results with float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedmlp
from bench.oracle import reference, tolerance

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
            param.overwrite_main_grad = case.mode == "overwrite"
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
        for name, group in zip(("dfc1", "dfc2"), self.weights, strict=True):
            results[name] = self._joined([p.main_grad for p in group])
        for name, group in zip(("dbias1", "dbias2"), self.biases, strict=True):
            if group:
                results[name] = self._joined([p.grad for p in group])
        return results

    def _joined(self, group: list[Tensor]) -> Tensor:
        return torch.stack(group) if self.case.apart else group[0]

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The results of `run` by plain autograd, expert by expert, in `dtype`."""
        groups = zip(("fc1", "fc2", "bias1", "bias2"), self.weights + self.biases, strict=True)
        tensors = {name: self._joined([p.detach() for p in group]) for name, group in groups if group}
        slots = torch.arange(self.probs.numel(), device=self.x.device)  # of rows, sorted by expert
        if self.case.top_k:
            slots = self.ids.where(self.ids >= 0, len(self.counts)).flatten().argsort(stable=True)
        slots = slots[: sum(self.counts)]
        tokens = slots // max(1, self.case.top_k)
        tensors |= {"x": self.x.detach()[tokens], "probs": self.probs.detach().flatten()[slots]}
        results = reference.grouped_mlp(
            tensors, self.counts, self.dy[tokens], dtype, layout=self.case.layout, **self.case.options
        )
        for name in ("y", "dx"):  # a token's rows add up
            results[name] = torch.zeros_like(self.x, dtype=torch.float64).index_add(0, tokens, results[name])
        dprobs = torch.zeros(self.probs.numel(), dtype=torch.float64, device=self.x.device)
        results["dprobs"] = dprobs.index_copy(0, slots, results["dprobs"]).view(self.probs.shape)
        for name in ("dfc1", "dfc2"):
            results[name] = self.microbatches * results[name] + self.initial
        return results


def compare(layer: Layer, results: dict[str, Tensor]) -> float:
    """Largest relative error of any result. Raises unless every element is right, and every result in its 2-norm."""
    exact, plain = layer.reference(torch.float64), layer.reference(layer.dtype)
    errors = tolerance.errors_of(results, exact, plain, layer.dtype)
    errors.verify()
    tolerance.assert_norms_close(results, exact, plain, layer.dtype)
    return max(errors.relative().values())
