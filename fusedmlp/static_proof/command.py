"""`python -m fusedmlp kernels`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import triton

from fusedmlp.static_proof import proof
from fusedmlp.static_proof.main_loop import MainLoop
from fusedmlp.static_proof.targets import TARGETS


def run(targets: Sequence[str] | None, jobs: int | None, as_json: bool, all_variants: bool) -> int:
    """Compile, print, and return the exit status: 1 if any kernel is not fit to ship."""
    names = list(dict.fromkeys(targets or TARGETS))
    jobs = jobs or proof.default_jobs()
    start = time.perf_counter()
    with _Progress(len(proof.tasks(names, all_variants))) as progress:
        rows = proof.prove(names, jobs, all_variants, progress)
    bad = [row for row in rows if not row.ok]
    if as_json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
    else:
        print(table(rows))
    print(
        f"Triton {triton.__version__}: {len(rows)} kernels for {', '.join(names)}; {len(bad)} not ok; "
        f"{time.perf_counter() - start:.0f} s in {jobs} processes",
        file=sys.stderr,
    )
    return 1 if bad else 0


# Of a step of the main loop, then of a tile beside its steps, in the order of `MainLoop`; "left": still in flight.
_LOOP = ("step", "MMA", "waits", "bar", "MMA left", "loads left", "tile", "stores", "waits", "bar", "joined")


def table(rows: Sequence[proof.Row]) -> str:
    """Rows as text; what is wrong with a row stands where the others say ok."""
    resources = ("regs", "spill B", "shared B", "tensor core", "TMA")
    header = ("target", "dtype", "kernel", *resources, *_LOOP, "config", "ok")
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
            *_numbers(row.main_loop),
            row.config,
            _verdict(row),
        )
        for row in rows
    ]
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(str(v).ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _numbers(loop: MainLoop | None) -> Iterator[str]:
    return ("-" if number is None else f"{number:g}" for number in loop or [None] * len(_LOOP))


def _verdict(row: proof.Row) -> str:
    if row.problems:
        return "; ".join(row.problems)
    return f"{', '.join(row.warnings)} known; ok" if row.warnings else "ok"


class _Progress:
    """A bar on stderr if that is a terminal and tqdm is installed, else nothing."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:
                return
            self._bar = tqdm(total=total, desc="compiling", unit="set")

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, task: proof.Task) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"{task.target} {task.dtype}")
            self._bar.update()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
