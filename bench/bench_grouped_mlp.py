"""Forward and backward of a grouped MLP with fp32 main_grad, beside PyTorch's own grouped_mm.

    python -m bench.bench_grouped_mlp [--json] [--seconds 3]

Both sides run the same layer on the same tensors, in turns, in one process, with the same number of rows for every
expert ("even") or as many as random routing gives them ("random"):
- fusedmlp: `grouped_mlp`, whose backward adds into `main_grad`;
- grouped_mm: `torch.nn.functional.grouped_mm` and autograd, then `main_grad.add_(grad)` for both weights.

Their outputs and gradients are compared before anything is timed. Times are medians in milliseconds. The largest
allocation of a backward pass comes from PyTorch's memory profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedmlp


class Shape(NamedTuple):
    """Experts, hidden size, ffn size, routed rows."""

    E: int
    H: int
    F: int
    R: int


SHAPES = (Shape(64, 512, 256, 4096), Shape(128, 256, 128, 4096), Shape(8, 512, 1024, 2048))


class Case:
    """One layer's tensors and the two ways to run it."""

    def __init__(self, shape: Shape, dtype: torch.dtype, load: str, device: str) -> None:
        torch.manual_seed(0)
        options = {"dtype": dtype, "device": device}
        self.x = torch.randn(shape.R, shape.H, **options, requires_grad=True)
        self.probs = torch.rand(shape.R, device=device, requires_grad=True)
        self.fc1 = nn.Parameter(torch.randn(shape.E, 2 * shape.F, shape.H, **options) * shape.H**-0.5)
        self.fc2 = nn.Parameter(torch.randn(shape.E, shape.H, shape.F, **options) * shape.F**-0.5)
        self.dy = torch.randn(shape.R, shape.H, **options)
        experts = torch.arange(shape.R) % shape.E if load == "even" else torch.randint(shape.E, (shape.R,))
        self.counts = experts.bincount(minlength=shape.E).to(device)
        self.ends = self.counts.cumsum(0).to(torch.int32)
        self.buffer = fusedmlp.MainGradBuffer([self.fc1, self.fc2])
        self.runs: dict[str, Callable[[], Callable[[], None]]] = {
            "fusedmlp": self.fusedmlp,
            "grouped_mm": self.grouped_mm,
        }

    def fusedmlp(self) -> Callable[[], None]:
        """Forward; returns the backward."""
        y = fusedmlp.grouped_mlp(self.x, self.fc1, self.fc2, self.counts, probs=self.probs)
        return lambda: y.backward(self.dy)

    def grouped_mm(self) -> Callable[[], None]:
        """Forward; returns the backward, which ends with the add into main_grad."""
        gate, linear = F.grouped_mm(self.x, self.fc1.transpose(1, 2), offs=self.ends).chunk(2, dim=-1)
        a = (F.silu(gate) * linear * self.probs.unsqueeze(1)).to(self.x.dtype)
        y = F.grouped_mm(a, self.fc2.transpose(1, 2), offs=self.ends)

        def backward() -> None:
            y.backward(self.dy)
            for weight in (self.fc1, self.fc2):
                weight.main_grad.add_(weight.grad)
                weight.grad = None

        return backward

    def reset(self) -> None:
        """Drop the gradients of a step, but not main_grad, which keeps accumulating."""
        for tensor in (self.x, self.probs, self.fc1, self.fc2):
            tensor.grad = None

    def check(self) -> None:
        """Both sides compute the same gradients."""
        results: dict[str, list[Tensor]] = {}
        for name, run in self.runs.items():
            self.buffer.zero_()
            self.reset()
            run()()
            results[name] = [self.x.grad, self.probs.grad, self.buffer.flat.clone()]
        for ours, theirs in zip(*results.values(), strict=True):
            tolerance = 8 * torch.finfo(self.x.dtype).eps * theirs.abs().max()
            assert (ours.float() - theirs.float()).abs().max() <= tolerance

    def largest_allocation(self, name: str) -> int:
        """Bytes of the largest single allocation in backward."""
        self.reset()
        backward = self.runs[name]()
        with torch.profiler.profile(profile_memory=True) as profile:
            backward()
        events = profile.profiler.kineto_results.events()
        return max(event.nbytes() for event in events if event.name() == "[memory]")


def measure(shape: Shape, dtype: torch.dtype, load: str, device: str, seconds: float) -> dict[str, object]:
    """One row of the table."""
    case = Case(shape, dtype, load, device)
    case.check()
    times: dict[str, list[float]] = {name: [] for name in case.runs}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times["fusedmlp"]) < 5:
        for name, run in case.runs.items():
            case.reset()
            start = time.perf_counter()
            run()()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    ours, theirs = (statistics.median(times[name][1:]) for name in ("fusedmlp", "grouped_mm"))
    weight_bytes = case.fc2.numel() * case.fc2.element_size()
    return {
        **shape._asdict(),
        "dtype": str(dtype).removeprefix("torch."),
        "load": load,
        "fusedmlp_ms": round(ours, 2),
        "grouped_mm_ms": round(theirs, 2),
        "speedup": round(theirs / ours, 2),
        "smallest_weight_MiB": round(weight_bytes / 2**20, 2),
        "fusedmlp_largest_alloc_MiB": round(case.largest_allocation("fusedmlp") / 2**20, 2),
        "grouped_mm_largest_alloc_MiB": round(case.largest_allocation("grouped_mm") / 2**20, 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time spent on each row")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for shape, dtype, load in product(SHAPES, (torch.float32, torch.bfloat16), ("even", "random")):
        rows.append(measure(shape, dtype, load, device, arguments.seconds))
        if not arguments.json:
            if len(rows) == 1:
                print("  ".join(name.rjust(8) for name in rows[0]))
            print("  ".join(str(value).rjust(max(8, len(name))) for name, value in rows[-1].items()), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
