"""Runs the benchmarks, unless there are results, and writes the page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from bench.cpu import layers
from bench.report import page, results
from fusedmlp.command_line import write
from fusedmlp.doctor import facts

ROOT = Path(__file__).parents[2]
SECONDS = 60  # of a layer on two cores, about


def run(folder: Path, measured: Path | None, tiny: bool, as_json: bool) -> int:
    """Write `index.html` and `results.csv` into the folder; return the exit status."""
    commit = facts.commit(ROOT) or "unknown"
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        print(f"bench: --report: expected a folder; got the file {folder}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    parts = folder / f"layers-{commit}"  # a run of another commit is not resumed
    if measured is None:
        if commit.endswith(("dirty", "unknown")):  # nor one of code that has no name
            shutil.rmtree(parts, ignore_errors=True)
        try:
            if not _measure(parts, folder / "results.csv", tiny):
                return 1
        finally:
            (parts / "unfinished").unlink(missing_ok=True)
            for empty in (parts, folder):
                with suppress(OSError):  # it is not
                    empty.rmdir()
        measured = parts
    found = results.load(measured)
    html, table = folder / "index.html", folder / "results.csv"
    text = page.render(found)
    results.save(found, table)
    write(html, text)
    if measured == parts:
        shutil.rmtree(parts)  # so that the next run measures anew
    print(json.dumps(found.table.to_dict("records"), indent=1) if as_json else f"Wrote {html} and {table}.")
    return 0


def _measure(parts: Path, table: Path, tiny: bool) -> bool:
    """Run the benchmarks layer by layer, each into a file of `parts` and then into `table`; False if one failed.

    A layer that has a file is not run again.
    """
    parts.mkdir(exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = {name: parts / f"{name}.json" for name in layers.cases(device, tiny)}
    left = [name for name, file in wanted.items() if not file.exists()]
    if len(left) < len(wanted):
        print(
            f"{len(wanted) - len(left)} of {len(wanted)} layers are in {parts}, from an interrupted run",
            file=sys.stderr,
        )
    seconds: float = 5 if tiny else SECONDS
    for done, name in enumerate(left):
        minutes = seconds * (len(left) - done) / 60
        print(f"layer {name}: {len(left) - done} left, about {minutes:.0f} minutes", file=sys.stderr, flush=True)
        start = time.monotonic()
        file = parts / "unfinished"
        command = [sys.executable, "-m", "pytest", "bench", "--benchmark-only", f"--benchmark-json={file}"]
        command += ["--benchmark-columns=median,iqr,rounds", "--benchmark-sort=name", f"--layer={name}"]
        # Progress, one line per file and a table, goes where it does not mix with --json.
        # In a session of its own: an interrupt reaches this process alone, which then kills that one.
        command += ["--tiny"] * tiny
        if subprocess.run(command, cwd=ROOT, stdout=sys.stderr, start_new_session=True).returncode:
            return False
        file.rename(wanted[name])
        results.save(results.load(parts), table)
        seconds = time.monotonic() - start
    return True
