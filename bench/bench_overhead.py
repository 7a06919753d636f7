"""What Python costs: one forward and backward of tiny layers, where there is next to nothing to compute.

    python -m bench.bench_overhead [--json] [--seconds 8]

The layer has 4 experts, 8 rows and features of 8, on one thread. Beside `grouped_mlp` in each mode stands the same
layer written with `torch.nn.functional.grouped_mm` and autograd. Times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import fusedmlp

E, R, SIZE = 4, 8, 8


def cases(device: str) -> dict[str, Callable[[], None]]:
    """What is timed: a function for each row."""
    x = torch.randn(R, SIZE, device=device, requires_grad=True)
    dy = torch.randn(R, SIZE, device=device)
    counts = torch.full((E,), R // E, device=device)
    ends = counts.cumsum(0).to(torch.int32)

    def layer(fused: bool, packed: bool) -> Callable[[], None]:
        module = fusedmlp.GroupedMLP(E, SIZE, SIZE, packed=packed, device=device)
        if fused:
            fusedmlp.MainGradBuffer(module.parameters())
        parameters = list(module.parameters())

        def step() -> None:
            module(x, counts).backward(dy)
            for parameter in parameters:
                parameter.grad = None

        return step

    fc1 = torch.randn(E, 2 * SIZE, SIZE, device=device, requires_grad=True)
    fc2 = torch.randn(E, SIZE, SIZE, device=device, requires_grad=True)

    def grouped_mm() -> None:
        gate, linear = F.grouped_mm(x, fc1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        F.grouped_mm(F.silu(gate) * linear, fc2.transpose(1, 2), offs=ends).backward(dy)
        fc1.grad = fc2.grad = None

    return {
        "fusedmlp, packed, main_grad": layer(True, True),
        "fusedmlp, packed, plain": layer(False, True),
        "fusedmlp, per expert, main_grad": layer(True, False),
        "grouped_mm and autograd": grouped_mm,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="spent on all rows")
    parser.add_argument("--json", action="store_true", help="print an object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = cases(device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    deadline = time.perf_counter() + arguments.seconds
    while time.perf_counter() < deadline:
        for name, step in steps.items():  # in turn: a machine's speed changes from second to second
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e6)
    results = {name: round(statistics.median(values), 1) for name, values in times.items()}
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        print("\n".join(f"{name:34} {microseconds:8.1f} us" for name, microseconds in results.items()))


if __name__ == "__main__":
    main()
