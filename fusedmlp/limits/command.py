"""`python -m fusedmlp bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from fusedmlp.limits import measure, roofline
from fusedmlp.limits.gpus import GPUS


def run(what: Literal["roofline", "schedule"], as_json: bool) -> None:
    """Print the rows of one report."""
    if what == "schedule":
        from fusedmlp.limits import balance  # needs Triton

        rows, text = list(balance.rows()), schedule_line
        header = "shape, load, pass, GPU: tiles, tiles per multiprocessor, idle share of its time"
    else:
        rows, text = list(roofline.rows()), roofline_line
        header = f"shape, load, pass: GFLOP, MB, limit in ms on {', '.join(gpu.name for gpu in GPUS)}"
        if torch.cuda.is_available():
            rows = list(measure.beside_limits(rows))
            header += "; measured ms, and the share of the limit that this GPU's own ceilings set"
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(header, rows, text)


def print_rows(header: str, rows: Iterable[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> None:
    """A title and one line per row."""
    print(header)
    for row in rows:
        print(text(row))


def roofline_line(row: dict[str, Any]) -> str:
    """One row as text."""
    limits = " ".join(f"{row['limit_ms'][gpu.name]:8.3f}" for gpu in GPUS)
    measured = f"  {row['ms']:8.3f} {row['of_limit']:5.2f}" if "ms" in row else ""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<21}"
    return f"{name}{row['flops'] / 1e9:10.1f} {row['bytes'] / 1e6:9.1f} {limits}{measured}"


def schedule_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<11}{row['gpu']:<10}"
    return f"{name}{row['tiles']:8} {row['tiles_per_processor']:8.1f} {row['idle']:6.1%}"
