"""One small grouped layer, and the same layer as a loop over experts in plain PyTorch and float64.

Sizes: 3 experts, the middle one without tokens. The last 2 of 7 rows are padding and hold NaN; for "moe" they are
tokens that chose experts elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.systems import one_rank
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import fusedmlp
from bench.oracle import reference
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPBackwardArguments

COUNTS, ROWS = (3, 0, 2), 7
TOP_K = ((2, 0), (0, 5), (2, 2), (-1, 0), (0, 2), (3, -1), (-2, 7))


class Layer:
    """`grouped_mlp` ("mlp"), `moe_experts` ("moe") or `grouped_linear` ("linear") with its weights.

    `params` are all weights (packed: one each for fc1 and fc2, else one per expert), `biases` likewise.
    """

    def __init__(
        self,
        kind: str = "mlp",
        packed: bool = True,
        *,
        layout: str = "out_in",
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        hidden: int = 4,
        ffn: int = 5,
    ) -> None:
        self.kind, self.packed, self.layout, self.dtype = kind, packed, layout, dtype
        self._widths = (hidden, ffn if kind == "linear" else hidden)
        self._generator = torch.Generator().manual_seed(0)
        shapes = [(ffn, hidden)] if kind == "linear" else [(2 * ffn, hidden), (hidden, ffn)]
        self.groups = [self._group(shape if layout == "out_in" else shape[::-1]) for shape in shapes]
        self.bias_groups = [self._group(shape[:1]) for shape in shapes] if bias else []
        self.params = [p for group in self.groups for p in group]
        self.biases = [p for group in self.bias_groups for p in group]
        self.probs = self._random(ROWS, 2).abs() if kind == "moe" else self._random(ROWS).abs()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def _group(self, shape: tuple[int, ...]) -> list[Parameter]:
        if self.packed:
            return [Parameter(self._random(len(COUNTS), *shape))]
        return [Parameter(self._random(*shape)) for _ in COUNTS]

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """A random x, NaN in its padding rows, and a random gradient of y."""
        generator = torch.Generator().manual_seed(100 + seed)
        x, dy = (torch.randn(ROWS, width, generator=generator).to(self.dtype) for width in self._widths)
        x[sum(COUNTS) :] = float("nan")
        return x, dy

    def use(self, weights: Sequence[Parameter]) -> None:
        """Run with these weights from now on."""
        self.params, count = list(weights), len(weights) // len(self.groups)
        self.groups = [self.params[i : i + count] for i in range(0, len(weights), count)]

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        """Run the layer of the library."""
        weights = [group[0] if self.packed else group for group in self.groups]
        names = ("bias",) if self.kind == "linear" else ("fc1_bias", "fc2_bias")
        if self.bias_groups:
            groups = [group[0] if self.packed else group for group in self.bias_groups]
            options |= dict(zip(names, groups, strict=True))
        if self.kind == "mlp":
            return fusedmlp.grouped_mlp(x, *weights, COUNTS, probs=self.probs, weight_layout=self.layout, **options)
        if self.kind == "moe":
            top_k = torch.tensor(TOP_K), self.probs
            return fusedmlp.moe_experts(x, *top_k, *weights, weight_layout=self.layout, **options)
        return fusedmlp.grouped_linear(x, *weights, COUNTS, weight_layout=self.layout, **options)

    def backward(self, *seeds: int, overwrites: bool = False, delayed: bool = False, **options: Any) -> None:
        """Forward and backward of the library, one micro-batch per seed (default: 1).

        `delayed`: a queue runs after the last. One that an error leaves with gradients warns, which fails a test.
        """
        if delayed:
            options["wgrad_queue"] = fusedmlp.WgradQueue()
        for seed in seeds or (1,):
            x, dy = self.batch(seed)
            y = self(x, **options)
            with self.overwriting() if overwrites else nullcontext():
                y.backward(dy)
        if delayed:
            options["wgrad_queue"].run()

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Give every weight `overwrite_main_grad` for the backwards inside."""
        before = [vars(param).copy() for param in self.params]
        for param in self.params:
            param.overwrite_main_grad = True
        try:
            yield
        finally:
            for param, had in zip(self.params, before, strict=True):
                del param.overwrite_main_grad
                vars(param).update({k: v for k, v in had.items() if k == "overwrite_main_grad"})

    def loop(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The layer as a loop over experts, of rows without padding; `tensors` replace `params + biases`."""
        experts, rest = [], list(tensors)
        for group in self.groups + self.bias_groups:
            mine, rest = rest[: len(group)], rest[len(group) :]
            experts.append(list(mine[0]) if self.packed else mine)
        weights, biases = experts[: len(self.groups)], experts[len(self.groups) :]
        if self.layout == "in_out":
            weights = [[w.T for w in group] for group in weights]

        probs, owned = self.probs.to(x.dtype), sum(COUNTS)
        if self.kind == "mlp":
            return reference.rows(x, *weights, COUNTS, probs, *biases)
        if self.kind == "linear":
            y = reference.gemm(x, weights[0], COUNTS)
            return y + torch.stack(biases[0]).repeat_interleave(torch.tensor(COUNTS), 0) if biases else y

        def term(t: int, k: int, e: int) -> Tensor:
            one = [group[e] for group in (*weights, *biases)]
            return reference.expert(x[t : t + 1], *one[:2], probs[t, k : k + 1], *one[2:]).y

        of_tokens = [
            sum(term(t, k, e) for k, e in enumerate(ids) if e in range(len(COUNTS)))
            for t, ids in enumerate(TOP_K[:owned])
        ]
        return torch.cat(of_tokens)  # type: ignore[arg-type]

    def wgrads(self, *seeds: int) -> list[Tensor]:
        """Gradients of `params + biases` by plain autograd in float64, summed over micro-batches (default: 1)."""
        tensors = [p.detach().double().requires_grad_() for p in self.params + self.biases]
        for seed in seeds or (1,):
            x, dy = self.batch(seed)
            self.loop(x.double(), tensors).backward(dy.double()[: sum(COUNTS)])
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]

    def attach(self, attribute: bool | None = None, *, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Give every weight a random main_grad, and the flag unless None; return copies of the main_grads."""
        for param in self.params:
            param.main_grad = self._random(*param.shape).to(dtype or torch.float32)
            if attribute is not None:
                param.grad_added_to_main_grad = attribute
        return [param.main_grad.clone() for param in self.params]

    def main_grads(self) -> list[Tensor]:
        return [param.main_grad for param in self.params]

    def grads(self) -> list[Tensor | None]:
        return [param.grad for param in self.params]


def _assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> None:
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=False):
        assert got is not None
        assert got.shape == want.shape
        error = (got.double() - want.double()).abs().max()
        bound = 16 * torch.finfo(dtype or got.dtype).eps * want.double().abs().max().clamp(min=1.0)
        assert error <= bound, f"off by {error}, allowed {bound}:\n{got}\n{want}"  # NaN fails


@pytest.fixture
def make_layer() -> type[Layer]:
    return Layer


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Compare lists of tensors with float64 references, within 16 roundings of the largest number."""
    return _assert_close


@pytest.fixture(autouse=True)
def nan_in_empty(poison: None) -> None:
    """`torch.empty` returns NaN, so that nothing uninitialised passes for zero."""
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.fixture
def ddp() -> Iterator[type[DistributedDataParallel]]:
    """DistributedDataParallel over gloo, one rank."""
    with one_rank():
        yield DistributedDataParallel


class Recorder:
    """Every weight-gradient GEMM of the library: where it wrote, and whether it added."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], bool]] = []

    @property
    def pointers(self) -> list[int]:
        return [pointer for _, pointers, _ in self.calls for pointer in pointers]


@pytest.fixture
def wgrad_gemms(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    linear, mlp = ops.grouped_wgrad_, ops.grouped_mlp_backward_

    def record(name: str, outputs: Sequence[Tensor], accumulate: bool) -> None:
        if outputs:
            recorder.calls.append((name, [t.data_ptr() for t in outputs], accumulate))

    def grouped_wgrad_(*args: Any) -> Any:
        record("wgrad", args[0], args[7])
        return linear(*args)

    def grouped_mlp_backward_(*args: Any) -> Any:
        given = MLPBackwardArguments(*args)
        record("fc1", given.dw1, given.accumulate1)
        record("fc2", given.dw2, given.accumulate2)
        return mlp(*args)

    monkeypatch.setattr(ops, "grouped_wgrad_", grouped_wgrad_)
    monkeypatch.setattr(ops, "grouped_mlp_backward_", grouped_mlp_backward_)
    return recorder
