"""Runs steps: each is a process with a time limit, and a failure or a hang of one leaves the others alone.

Processes are forked from this one, which has imported PyTorch and Triton and uses neither the GPU nor threads.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.gpu import archive, compare
from bench.gpu.jobs import Step
from bench.gpu.rows import Table

CHECKS = 0.4  # of the time, at most
_processes = multiprocessing.get_context("fork")


class Outcome(NamedTuple):
    """Outcome of a step: "ok" or what went wrong, time and output."""

    step: Step
    status: str
    seconds: float
    output: str

    def __str__(self) -> str:
        """One line, and a few more about failures."""
        found = [line for line in self.output.splitlines() if line.startswith("FAIL") or "ERROR SUMMARY" in line]
        if self.status not in ("ok", "no time left"):
            found += self.output.splitlines()[-2:]
        return "\n    ".join([f"{self.step.name}: {self.status} ({self.seconds:.0f} s)", *(f[:160] for f in found[:5])])


class _Running:
    """A step that has started; its output goes to a file."""

    def __init__(self, step: Step, output: Path, deadline: float) -> None:
        self.step, self.output, self.start = step, output, time.monotonic()
        self.limit = min(self.start + step.seconds, deadline)
        self.process = _processes.Process(target=_main, args=(step, output))
        self.process.start()

    def end(self) -> Outcome:
        """End it, if it has not ended, and the processes that it started."""
        hung = self.process.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # if it was not a group's leader yet
        self.process.join()
        seconds, code = time.monotonic() - self.start, self.process.exitcode
        if hung:
            status = f"stopped after {seconds:.0f} s"
        elif code < 0:
            status = f"killed by {signal.Signals(-code).name}"
        else:
            status = f"exit status {code}" if code else "ok"
        output = self.output.read_text(errors="replace") if self.output.exists() else ""
        return Outcome(self.step, status, seconds, output)


def _main(step: Step, output: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(step.environment)
    if step.prefix:
        os.execvp(step.prefix[0], [*step.prefix, sys.executable, "-m", step.module, *step.arguments])
    sys.argv[1:] = step.arguments
    runpy.run_module(step.module, run_name="__main__", alter_sys=True)


def import_once(site: Path) -> None:
    """Set this process up: import what every step needs, the Triton of `site` if there is one, and this project."""
    folders = [str(site), str(archive.ROOT), str(archive.ROOT / "tests")]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PYTHONUNBUFFERED"] = "1"
    import torch
    from triton.runtime import cache

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes that run, too
    with suppress(Exception):  # private: it reads all of Triton, and is remembered
        cache.triton_key()


def processes(steps: Sequence[Step], jobs: int, deadline: float, tick: Callable[[], object] = str) -> Iterator[Outcome]:
    """Run steps, `jobs` at a time, and yield their outcomes as they end; none begins or lasts after the deadline.

    `tick` is called every 20 seconds, and when a step ends.
    """
    waiting, running = list(steps), list[_Running]()
    with TemporaryDirectory() as folder:
        try:
            while running or (waiting and time.monotonic() < deadline):
                while waiting and len(running) < jobs and time.monotonic() < deadline:
                    running.append(_Running(waiting.pop(0), Path(folder, str(len(waiting))), deadline))
                first = min(each.limit for each in running)
                wait = min(20, max(0, first - time.monotonic()))
                connection.wait([each.process.sentinel for each in running], wait)
                tick()
                for each in [*running]:
                    if not each.process.is_alive() or time.monotonic() >= each.limit:
                        running.remove(each)
                        yield each.end()
        finally:
            for each in running:
                each.end()
    yield from (Outcome(step, "no time left", 0, "") for step in waiting)


def _ask(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Return what a function returns in a process of its own; None if it fails or takes longer."""
    mine, others = _processes.Pipe(duplex=False)
    process = _processes.Process(target=lambda: others.send(function(*arguments)))
    process.start()
    others.close()
    found = None
    with suppress(EOFError):
        found = mine.recv() if mine.poll(seconds) else None
    process.kill()
    process.join()
    return found


def _machine(device: str) -> dict[str, str] | None:
    from bench.gpu import card  # imports torch, for which `import_once` sets the path

    return card.facts(device)


def everything(steps: list[Step], out: Path, device: str, deadline: float, jobs: int, fresh: bool, small: bool) -> int:
    """Run the steps that `out` does not have yet, and print how they ended, the times, and what they compare to."""
    start = time.monotonic()
    import_once(archive.SITE)
    archive.unpack()
    machine = _ask(_machine, device, seconds=deadline - start)
    if machine is None:
        print(
            "bench.gpu: expected a GPU; torch finds none. --device sm_90 tries the steps without one", file=sys.stderr
        )
        return 2
    here = {name: machine[name] for name in ("gpu", "torch", "triton", "commit")} | {"small": str(small)}
    ended = Table(out / "steps.csv")
    if fresh:
        for name in ("steps.csv", "timings.csv", "stacks.csv", "measured.txt", "log.txt"):
            (out / name).unlink(missing_ok=True)
    for row in (before := ended.read()):
        if (found := {name: row[name] for name in here}) != here:
            print(f"bench.gpu: expected results of {here} in {out}; got {found}: --fresh removes them", file=sys.stderr)
            return 2
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.json").write_text(json.dumps(machine, indent=1))
    os.environ["BENCH_GPU_OUT"] = str(out)
    done, kernels, failed = {row["step"] for row in before if row["status"] == "ok"}, archive.kernels(), 0
    missing = [step for step in steps if step.name not in done]
    print(f"{machine['gpu']}, commit {machine['commit']}: {len(missing)} of {len(steps)} steps to run", flush=True)
    checks, rest = ([step for step in missing if step.beside_others is beside] for beside in (True, False))
    until = start + CHECKS * (deadline - start) if rest else deadline
    with (out / "log.txt").open("a") as log:
        for group, many, stop in ((checks, jobs, until), (rest, 1, deadline)):
            for outcome in processes(group, many, stop):
                failed += outcome.status != "ok"
                print(f"[{time.monotonic() - start:4.0f} s] {outcome}", flush=True)
                print(f"== {outcome.step.name}: {outcome.status}\n{outcome.output}", file=log, flush=True)
                ended.append({"step": outcome.step.name, "status": outcome.status, **here})
    if (out / "timings.csv").exists():
        print(compare.summary(out), end="\n\n")
        compare.main(out)
    print(f"{len(missing) - failed} of {len(missing)} steps ok; {archive.kernels() - kernels} kernels compiled here")
    return int(bool(failed))
