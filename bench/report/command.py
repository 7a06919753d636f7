"""Runs the benchmarks, unless there are results, and writes the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.report import page, results

ROOT = Path(__file__).parents[2]


def run(folder: Path, measured: Path | None, tiny: bool, as_json: bool) -> int:
    """Write `index.html` and `results.csv` into the folder; return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    if measured is None:
        measured = folder / "benchmarks.json"
        command = [sys.executable, "-m", "pytest", "bench", "--benchmark-only", f"--benchmark-json={measured}"]
        command += ["--benchmark-columns=median,iqr,rounds", "--benchmark-sort=name"] + ["--tiny"] * tiny
        # Progress, one line per file and a table, goes where it does not mix with --json.
        if subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode:
            return 1
    found = results.load(measured)
    html, table = folder / "index.html", folder / "results.csv"
    results.save(found, table)
    html.write_text(page.render(found), encoding="utf-8")
    print(json.dumps(found.table.to_dict("records"), indent=1) if as_json else f"Wrote {html} and {table}.")
    return 0
