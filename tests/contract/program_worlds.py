"""Run one training program twice, with fusedmlp and with plain PyTorch in float64, and compare what it sees.

A program is a function of a world `w`. It calls PyTorch for all but layers, buffers and queues, which `w` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from contract import program_reference
from contract.program_reference import EXPERTS, FFN, HIDDEN
from torch import Tensor, nn

import fusedmlp
from bench.oracle import reference

TOLERANCE = 2e-5  # of the largest number of a tensor, or of 1; a lost gradient is 1e-2 and more


class World:
    """The names that a program may use: `net` holds its layers; `see` and `check` record what is compared."""

    dtype: torch.dtype

    def __init__(self) -> None:
        self.net: Any = nn.Module()
        self.seen: list[tuple[str, Tensor | None]] = []
        self.owned: list[Any] = []  # parameters with the main_grad of an owner
        self._draws = 0
        self._watched: dict[str, tuple[int, Tensor | None]] = {}

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers, the same for the n-th draw of both worlds."""
        self._draws += 1
        generator = torch.Generator().manual_seed(self._draws)
        return torch.randn(shape, generator=generator).to(self.dtype)

    def rows(self, count: int, *, requires_grad: bool) -> Tensor:
        return self.draw(count, HIDDEN).requires_grad_(requires_grad)

    def loss(self, h: Tensor) -> Tensor:
        return 0.2 * (h.tanh() * self.draw(*h.shape)).sum()  # bounded, so that no program's numbers grow without end

    def filled(self, layer: nn.Module) -> nn.Module:
        """The layer with drawn parameters."""
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(0.3 * self.draw(*param.shape))
        return layer

    def dense(self) -> nn.Module:
        return self.filled(nn.Linear(HIDDEN, HIDDEN, dtype=self.dtype))

    def params(self, *layers: str) -> list[Tensor]:
        """Parameters of these layers of `net`; a tied one belongs to the first layer that has it."""
        return [param for name, param in self.net.named_parameters() if name.split(".")[0] in layers]

    def see(self, label: str, value: Tensor | Sequence[Tensor | None] | None) -> None:
        """Record numbers; None must be None in both worlds."""
        values = [value] if value is None or isinstance(value, Tensor) else value
        self.seen += [(label, None if each is None else each.detach().clone()) for each in values]

    def watch(self, name: str, param: Any) -> Any:
        """Add a post-accumulate-grad hook that reads; `check` compares its last reading and the number of its calls."""

        def read(param: Tensor) -> None:
            calls, _ = self._watched.get(name, (0, None))
            self._watched[name] = calls + 1, None if param.grad is None else param.grad.detach().clone()

        return param.register_post_accumulate_grad_hook(read)

    def check(self, label: str) -> None:
        """Record all weights and gradients, and what hooks have read."""
        for name, param in self.net.named_parameters():
            self.see(f"{label}: {name}", param)
            self.see(f"{label}: {name}.grad", param.grad)
        for name, (calls, grad) in sorted(self._watched.items()):
            self.see(f"{label}: calls of the hook of {name}", torch.tensor(float(calls)))
            self.see(f"{label}: what the hook of {name} read", grad)
        self._watched.clear()


class Fused(World):
    """Layers, buffers and queues of fusedmlp, in float32."""

    dtype = torch.float32

    def mlp(self, **options: Any) -> nn.Module:
        return self.filled(fusedmlp.GroupedMLP(EXPERTS, HIDDEN, FFN, **options))

    def linear(self, **options: Any) -> nn.Module:
        return self.filled(fusedmlp.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, **options))

    grouped_linear = staticmethod(fusedmlp.grouped_linear)

    def queue(self, *, fuse_microbatches: bool) -> Any:
        return fusedmlp.WgradQueue(fuse_microbatches=fuse_microbatches)

    def compile(self, layer: nn.Module) -> Any:
        return torch.compile(layer, backend="aot_eager")

    def buffer(self, params: list[Tensor]) -> Any:
        return FusedBuffer(params)

    def own(self, params: list[Tensor], *, attribute: bool) -> None:
        """Give parameters a `main_grad`, and the attribute `grad_added_to_main_grad`, as Megatron does."""
        self.owned = params
        for param in self.owned:
            param.main_grad = torch.zeros_like(param)
            if attribute:
                param.grad_added_to_main_grad = False

    def deliver(self) -> None:
        """Set `.grad` to all of the gradient; where the attribute is True, `.grad` is zeros."""
        for param in self.owned:
            param.grad = param.main_grad.clone() if param.grad is None else param.main_grad + param.grad

    def zero_owned(self) -> None:
        for param in self.owned:
            param.grad = None
            param.main_grad.zero_()
            if hasattr(param, "grad_added_to_main_grad"):
                param.grad_added_to_main_grad = False


class FusedBuffer(fusedmlp.MainGradBuffer):
    """A buffer whose `flat` a program can scale."""

    def scale(self, factor: float) -> None:
        self.flat.mul_(factor)


class Plain(World):
    """The same in plain PyTorch: a loop over experts, and `.grad`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def mlp(self, *, activation: str, bias: bool, packed: bool, **_: Any) -> nn.Module:
        return self.filled(program_reference.MLP(activation, bias, packed).to(self.dtype))

    def linear(self, *, bias: bool, packed: bool, **_: Any) -> nn.Module:
        return self.filled(program_reference.Linear(HIDDEN, HIDDEN, bias, packed).to(self.dtype))

    @staticmethod
    def grouped_linear(x: Tensor, weight: Any, counts: list[int], *, weight_layout: str = "out_in", **_: Any) -> Tensor:
        weights = [w.T if weight_layout == "in_out" else w for w in weight]
        return program_reference.with_padding(reference.gemm(x, weights, counts), x)

    def queue(self, *, fuse_microbatches: bool) -> Any:
        return program_reference.Queue()

    def compile(self, layer: nn.Module) -> Any:
        return layer

    def buffer(self, params: list[Tensor]) -> Any:
        return program_reference.Buffer(params)

    def own(self, params: list[Tensor], *, attribute: bool) -> None:
        self.owned = params

    def deliver(self) -> None:
        for param in self.owned:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad

    def zero_owned(self) -> None:
        for param in self.owned:
            param.grad = None


def errors(got: World, want: World) -> list[float]:
    """The error of every tensor that a program has seen; raises where only one of two is None."""
    assert [label for label, _ in got.seen] == [label for label, _ in want.seen]
    found = []
    for (label, a), (_, b) in zip(got.seen, want.seen, strict=True):
        assert (a is None) == (b is None), f"{label}: expected {b}; got {a}"
        if a is None or b is None:
            found.append(0.0)
            continue
        assert a.shape == b.shape, f"{label}: expected {b.shape}; got {a.shape}"
        found.append(((a - b).abs().max() / b.abs().max().clamp(min=1)).item())
    return found


def compare(program: Callable[[Any], None]) -> float:
    """Run the program in both worlds; raise AssertionError at the first difference. Returns the largest error.

    A program may multiply rounding errors. Only then plain PyTorch runs in float32, too, and shows by how much.
    """
    fused, plain, float32 = Fused(), Plain(torch.float64), Plain(torch.float32)
    program(fused)
    program(plain)
    found = errors(fused, plain)
    tolerance = TOLERANCE
    if not all(error <= tolerance for error in found):  # NaN is not
        program(float32)
        tolerance += 4 * max(errors(float32, plain))
    for error, (label, got), (_, want) in zip(found, fused.seen, plain.seen, strict=True):
        assert error <= tolerance, f"{label}: differs by {error:.1e}; expected\n{want}\ngot\n{got}"
    return max(found)
