"""Trainings of whole models in each stack, as a table; those that were not measured are named."""

from __future__ import annotations

from pathlib import Path

from bench.gpu import jobs
from bench.gpu.rows import Table
from bench.report.gpu import FOLDER, table

HEADER = ["stack, model, mode", "experts", "ms a step", "in experts", "tokens/s", "peak GiB", "loss", "gradients"]
_AGREES = {"True": "agree", "False": "**differ**", "": "not compared"}
Rows = list[dict[str, str]]


def lines(rows: Rows) -> list[list[str]]:
    """A line for each training, by stack; one without figures for a stack that has none."""
    found = []
    for step in jobs.stacks("cuda"):
        stack, model, *rest = step.arguments
        key = {"stack": stack, "model": model, "mode": "compiled" if "--compiled" in rest else "eager"}
        here = [row for row in rows if key.items() <= row.items()]
        name = ", ".join(key.values())
        found += [[name, *_cells(row)] for row in here] or [[name, "not measured yet", *["-"] * (len(HEADER) - 2)]]
    return found


def _cells(row: dict[str, str]) -> list[str]:
    ms, experts, mib = (float(row[name] or "nan") for name in ("ms", "experts_ms", "mib"))
    share, peak = (f"{experts / ms:.0%}", f"{mib / 1024:.1f}")
    cells = [row["experts"], f"{ms:.1f}", share, f"{1e3 * int(row['tokens']) / ms:,.0f}", peak]
    cells += [f"{row['first_loss']} to {row['last_loss']}", _AGREES[row["agrees"]]]
    return [cell.replace("nan%", "-").replace("nan", "-") for cell in cells]


def gpu_stacks(folder: Path = FOLDER) -> str:
    """The committed trainings, of each GPU that has any."""
    tables = []
    for path in sorted(folder.glob("*_stacks.csv")):
        rows = Table(path).read()
        about = {name: rows[0][name] for name in ("gpu", "torch", "triton", "commit", "date")}
        tables += [f"{about['gpu']}, torch {about['torch']}, Triton {about['triton']}, commit {about['commit']}, "
                   f"{about['date']}:", table(HEADER, lines(rows))]  # fmt: skip
    return "\n\n".join(tables) or table(HEADER, lines([]))
