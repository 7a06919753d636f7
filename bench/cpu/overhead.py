"""Overhead of Python: one forward and backward of tiny layers, where there is next to nothing to compute.

    python -m bench.cpu.overhead [--json] [--seconds 12]

Layers have 8 features and two rows an expert, and run on one thread: `GroupedMLP` in each mode, and the same layer
written with `torch.nn.functional.grouped_mm` and autograd. Times are in microseconds: of the whole step, and of the
gradient contract's part in it (`fusedmlp/contract/`), before and after the GEMMs of backward. A round is the median of
20 steps; rows take turns, and the fastest of several rounds counts, because other processes use the machine, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import fusedmlp
from fusedmlp.autograd.layers import Call

SIZE, ROUND = 8, 20


class ContractClock:
    """Adds up the seconds that backwards in this context spend in the contract."""

    def __init__(self) -> None:
        self.seconds = 0.0
        timed = {name: self._timed(getattr(Call, name)) for name in ("route", "finish")}
        self._patch = mock.patch.multiple(Call, **timed)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return run

    def __enter__(self) -> ContractClock:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def layer(num_experts: int, device: str, main_grad: str = "", **options: Any) -> Callable[[], None]:
    """A step of fusedmlp; `main_grad`: "" (none), "flag" or "no flag" (`grad_added_to_main_grad`)."""
    module = fusedmlp.GroupedMLP(num_experts, SIZE, SIZE, device=device, **options)
    if main_grad:
        fusedmlp.MainGradBuffer(module.parameters(), grad_added_to_main_grad=main_grad == "flag")
    parameters = list(module.parameters())
    x, dy, counts = _inputs(num_experts, device)

    def step() -> None:
        module(x, counts).backward(dy)
        module.backward_dw()
        for parameter in parameters:  # as Megatron's hooks do
            parameter.grad = None

    return step


def grouped_mm(num_experts: int, device: str) -> Callable[[], None]:
    """The same step in plain PyTorch."""
    x, dy, counts = _inputs(num_experts, device)
    ends = counts.cumsum(0).to(torch.int32)
    fc1 = torch.randn(num_experts, 2 * SIZE, SIZE, device=device, requires_grad=True)
    fc2 = torch.randn(num_experts, SIZE, SIZE, device=device, requires_grad=True)

    def step() -> None:
        gate, linear = F.grouped_mm(x, fc1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        F.grouped_mm(F.silu(gate) * linear, fc2.transpose(1, 2), offs=ends).backward(dy)
        fc1.grad = fc2.grad = None

    return step


def _inputs(num_experts: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = 2 * num_experts
    x = torch.randn(rows, SIZE, device=device, requires_grad=True)
    return x, torch.randn(rows, SIZE, device=device), torch.full((num_experts,), 2, device=device)


def cases(device: str) -> dict[str, Callable[[], None]]:
    """The step to time for each row."""
    return {
        "4 experts, packed, main_grad": layer(4, device, "flag"),
        "4 experts, packed, plain": layer(4, device),
        "4 experts, one tensor each, main_grad": layer(4, device, "flag", packed=False),
        "4 experts, grouped_mm and autograd": grouped_mm(4, device),
        "64 experts, packed, main_grad": layer(64, device, "flag"),
        "64 experts, packed, plain": layer(64, device),
        "64 experts, one tensor each, main_grad": layer(64, device, "flag", packed=False),
        "64 experts, one tensor each, main_grad without the flag": layer(64, device, "no flag", packed=False),
        "64 experts, one tensor each, main_grad, delayed": layer(64, device, "flag", packed=False, delay_wgrad=True),
        "64 experts, one tensor each, plain": layer(64, device, packed=False),
        "64 experts, grouped_mm and autograd": grouped_mm(64, device),
    }


def measure(seconds: float) -> dict[str, dict[str, float]]:
    """`{row: {"us": ..., "contract_us": ...}}`: the fastest round of each row; rows take turns."""
    steps = cases("cuda" if torch.cuda.is_available() else "cpu")
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    deadline = time.perf_counter() + seconds
    with ContractClock() as clock:
        while time.perf_counter() < deadline or not all(rounds.values()):
            for name, step in steps.items():
                times = [_timed(step, clock) for _ in range(ROUND)]
                whole, contract = (statistics.median(t) for t in zip(*times, strict=True))
                rounds[name].append((whole, contract))
    fastest = {name: map(min, zip(*row, strict=True)) for name, row in rounds.items()}
    return {
        name: {"us": round(1e6 * whole, 1), "contract_us": round(1e6 * contract, 1)}
        for name, (whole, contract) in fastest.items()
    }


def _timed(step: Callable[[], None], clock: ContractClock) -> tuple[float, float]:
    clock.seconds, start = 0.0, time.perf_counter()
    step()
    return time.perf_counter() - start, clock.seconds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="spent on all rows")
    parser.add_argument("--json", action="store_true", help="print an object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(arguments.seconds)
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    for name, row in results.items():
        print(f"{name:56} {row['us']:8.1f} us, contract {row['contract_us']:7.1f} us")


if __name__ == "__main__":
    main()
