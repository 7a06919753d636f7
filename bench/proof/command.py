"""`python -m fusedmlp kernels`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton

from bench.proof import hashes, proof
from fusedmlp.command_line import lines
from fusedmlp.targets import TARGETS


def run(targets: Sequence[str] | None, jobs: int | None, as_json: bool, all_variants: bool) -> int:
    """Compile, print, and return the exit status: 1 if any kernel is not fit to ship, or its hash differs."""
    rows, summary = _compile(proof.tasks(_names(targets), all_variants), jobs)
    bad = [row for row in rows if not row.ok]
    print(json.dumps([row.as_json() for row in rows], indent=1) if as_json else table(rows))
    print(f"{summary}; {len(bad)} not ok", file=sys.stderr)
    if all_variants or triton.__version__ not in hashes.TRITONS:
        return 1 if bad else 0
    return _compare(rows, _names(targets), hashes.TABLE) or (1 if bad else 0)


def run_hashes(
    targets: Sequence[str] | None, jobs: int | None, as_json: bool, all_variants: bool, write: bool, file: Path | None
) -> int:
    """Compile without ptxas, print every launch's hash, and compare with the table in `file`, or write it.

    Returns the exit status: 1 if a launch does not compile or its hash differs, 2 if the table is of other Tritons.
    """
    if triton.__version__ not in hashes.TRITONS:
        expected = ", ".join(hashes.TRITONS)
        print(f"kernels --hashes: expected a Triton among {expected}; got {triton.__version__}", file=sys.stderr)
        return 2
    names, file = _names(targets), file or hashes.TABLE
    rows, summary = _compile(proof.tasks(names, all_variants, only_hashes=True), jobs)
    found = hashes.of(rows, triton.__version__)
    if as_json:
        print(json.dumps([launch._asdict() | {"hash": each} for launch, each in found.items()], indent=1))
    else:
        print(_aligned([("hash", *hashes.Launch._fields), *((each, *launch) for launch, each in found.items())]))
    print(summary, file=sys.stderr)
    bad = [row for row in rows if not row.ok]
    for row in bad:
        print(f"{row.target} {row.dtype} {row.kernel} {row.config}: {'; '.join(row.problems)}", file=sys.stderr)
    if write and not bad:
        hashes.write(triton.__version__, found, names, file)
        return 0
    return 1 if bad else _compare(rows, names, file)


def _names(targets: Sequence[str] | None) -> list[str]:
    return list(dict.fromkeys(targets or TARGETS))


def _compile(tasks: Sequence[proof.Task], jobs: int | None) -> tuple[list[proof.Row], str]:
    """The rows, and what was done, as text."""
    jobs = jobs or proof.default_jobs()
    start = time.perf_counter()
    with _progress(len(tasks)) as progress:
        rows = proof.prove(tasks, jobs, progress)
    names = ", ".join(dict.fromkeys(task.target for task in tasks))
    took = f"{time.perf_counter() - start:.0f} s in {jobs} processes"
    return rows, f"Triton {triton.__version__}: {len(rows)} kernels for {names}; {took}"


def _compare(rows: Sequence[proof.Row], targets: Sequence[str], file: Path) -> int:
    """Print the launches whose hash differs from the table's to stderr; return 1 if there are any, else 0."""
    lines = list(
        hashes.differences(hashes.read(triton.__version__, targets, file), hashes.of(rows, triton.__version__))
    )
    if lines:
        print(f"{len(lines)} launches are other code than in {file}:", *lines, hashes.MEND, sep="\n", file=sys.stderr)
    return 1 if lines else 0


def table(rows: Sequence[proof.Row]) -> str:
    """Rows as text; the last column is ok, or the problems of a row."""
    resources = ("regs", "spill B", "shared B", "tensor core", "TMA")
    header = ("target", "dtype", "kernel", *resources, "config", "ok")
    lines: list[tuple[Any, ...]] = [header]
    lines += [
        (
            row.target,
            row.dtype,
            row.kernel,
            row.registers,
            row.spill_bytes,
            f"{row.shared_bytes:,}",
            row.tensor_core_instructions,
            row.tma_instructions,
            row.config,
            "; ".join(row.problems) or "ok",
        )
        for row in rows
    ]
    return _aligned(lines)


def _aligned(lines: Sequence[tuple[Any, ...]]) -> str:
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(str(v).ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in lines)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[proof.Task], None]]:
    """Yield what to call after each task: a bar on stderr if that is a terminal and tqdm is installed, else lines."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        tqdm = None
    done: list[proof.Task] = []
    if tqdm is None or not sys.stderr.isatty():
        start = time.perf_counter()
        with lines(lambda: f"compiling: {len(done)} of {total} sets, {time.perf_counter() - start:.0f} s"):
            yield done.append
        return
    with tqdm(total=total, desc="compiling", unit="set") as bar:

        def update(task: proof.Task) -> None:
            bar.set_postfix_str(f"{task.target} {task.dtype}")
            bar.update()

        yield update
