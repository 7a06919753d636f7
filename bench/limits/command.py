"""`python -m fusedmlp bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import torch

from bench.limits import measure, roofline
from bench.limits.scope import Scope

Report = tuple[str, list[dict[str, Any]], Callable[[dict[str, Any]], str]]  # title, rows, a row as text


def run(what: Literal["roofline", "eight_bit", "schedule"], as_json: bool, scope: Scope) -> None:
    """Print the rows of one report, of the layers, loads and GPUs of a scope.

    Raises:
        ValueError: no GPU or no layer of the scope has such a report.
    """
    header, rows, text = _REPORTS[what](scope)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(header)
    for row in rows:
        print(text(row))


def _roofline(scope: Scope) -> Report:
    rows = list(roofline.rows(scope))
    header = f"shape, load, pass: GFLOP, MB, limit in ms on {', '.join(gpu.name for gpu in scope.gpus)}"
    if torch.cuda.is_available():
        rows = list(measure.beside_limits(rows, scope))
        header += "; measured ms, and the share of the limit that this GPU's own ceilings set"
    return header, rows, _roofline_line


def _roofline_line(row: dict[str, Any]) -> str:
    limits = " ".join(f"{each:9.4f}" for each in row["limit_ms"].values())
    measured = f"  {row['ms']:9.4f} {row['of_limit']:5.2f}" if "ms" in row else ""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<21}"
    return f"{name}{row['flops'] / 1e9:10.1f} {row['bytes'] / 1e6:9.1f} {limits}{measured}"


def _eight_bit(scope: Scope) -> Report:
    from bench.limits import eight_bit  # needs Triton

    if not (rows := list(eight_bit.rows(scope))):
        raise ValueError("expected a GPU with an 8-bit recipe, and sizes that are multiples of its blocks: 128, or 32")
    return "shape, load, launch, GPU: GFLOP, MB, limit in ms", rows, _eight_bit_line


def _eight_bit_line(row: dict[str, Any]) -> str:
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<23}{row['gpu']:<10}"
    return f"{name}{row['flops'] / 1e9:10.1f} {row['bytes'] / 1e6:9.1f} {row['limit_ms']:9.4f}"


def _schedule(scope: Scope) -> Report:
    from bench.limits import balance  # needs Triton

    header = "shape, load, pass, GPU: tiles, tiles per multiprocessor, idle share of its time"
    return header, list(balance.rows(scope)), _schedule_line


def _schedule_line(row: dict[str, Any]) -> str:
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<11}{row['gpu']:<10}"
    return f"{name}{row['tiles']:8} {row['tiles_per_processor']:8.1f} {row['idle']:6.1%}"


_REPORTS: dict[str, Callable[[Scope], Report]] = {
    "roofline": _roofline,
    "eight_bit": _eight_bit,
    "schedule": _schedule,
}
