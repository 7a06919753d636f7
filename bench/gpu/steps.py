"""Everything that needs a GPU, in one command: `python -m bench.gpu --out DIR [--minutes 9]`.

Every step is a process with a time limit of its own, and a failure or a hang of one leaves the others alone:
the checks of `tests/gpu/checks.py`, the small one under compute-sanitizer, and `bench.gpu.timings` shape by shape into
DIR/timings.csv, each also with the warp-specialized kernels. Output of the steps goes to DIR/log.txt. Short tables of
times and of steps, with their failures, come last. Exit status 1 if any step failed, 2 if there is no GPU.

`--unsupported-versions` is for GPU machines that have nothing newer than torch 2.11 and Triton 3.6: kernels run there,
but the library does not work with them (docs/limits.md), so nothing else may set FUSEDMLP_UNSUPPORTED_VERSIONS.

`--device cpu` tries every step on tiny shapes without a GPU; that checks this program, not the kernels.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# The most informative first: time may run out anywhere in the list.
SHAPES = (
    "qwen3-30b-8k",
    "sonic-d",
    "deepseek-ep",
    "gpt-oss-20b",
    "mixtral",
    "sonic-a",
    "qwen3-30b-32k",
    "sonic-c",
    "sonic-b",
    "qwen3.5",
)


@dataclass(frozen=True)
class Step:
    """One process."""

    name: str
    command: tuple[str, ...]
    seconds: float  # at most


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step: its status, time and output."""

    step: str
    status: str  # "ok", or what went wrong
    seconds: float
    output: str


def steps(device: str, out: Path) -> list[Step]:
    """The steps, in order; time limits leave room for compiling kernels the first time."""

    def check(name: str, seconds: float, *prefix: str, size: tuple[str, ...] = (), step: str = "") -> Step:
        command = (*prefix, sys.executable, "-m", "gpu.checks", name, "--device", device, *size)
        return Step(step or name, command, seconds)

    def timing(shape: str) -> Step:
        options = ("--csv", str(out / "timings.csv"), "--device", device)
        return Step(f"timings-{shape}", (sys.executable, "-m", "bench.gpu.timings", shape, *options), 75)

    def both(step: Step) -> tuple[Step, Step]:
        """The step with the other kernels, and with the warp-specialized ones wherever there are any."""
        switch, name = "FUSEDMLP_WARP_SPECIALIZED", f"{step.name}-warp_specialized"
        with_them = Step(name, ("env", f"{switch}=1", *step.command), step.seconds)
        return Step(step.name, ("env", f"{switch}=0", *step.command), step.seconds), with_them

    small = ("--small",) if device == "cpu" else ()
    checks = [check(name, 90, size=small) for name in ("bf16", "fp16", "sync", "graph", "repeat")]
    interpreted = ("env", "TRITON_INTERPRET=1") if device == "cpu" else ()
    checks.insert(0, check("cases", 180, *interpreted, size=small))
    shapes = SHAPES if device == "cuda" else ("tiny",)
    memcheck = []
    if device == "cuda" and (tool := shutil.which("compute-sanitizer")):
        # One allocation for each tensor: an access past its end would else land in PyTorch's cached block, undetected.
        uncached = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
        prefix = (*uncached, tool, "--tool", "memcheck", "--error-exitcode", "9", "--launch-timeout", "60")
        memcheck = [check("small", 90, *prefix, size=("--small",), step="memcheck-small")]
    timings = [timing(shape) for shape in shapes]
    if device == "cuda":  # passes without a warp-specialized kernel run the same one twice
        timings = [each for one in timings for each in both(one)]
        checks = [each for one in checks for each in (both(one) if one.name != "sync" else (one,))]
    # The first timings come early, so that a slow memory checker cannot cost all of them.
    return [*checks, *timings[:2], *memcheck, *timings[2:]]


def run(step: Step, seconds: float, unsupported_versions: bool = False) -> Outcome:
    """Run one step for at most `seconds`."""
    environment = os.environ | {
        "FUSEDMLP_UNSUPPORTED_VERSIONS": str(int(unsupported_versions)),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            status = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            status = f"stopped after {seconds:.0f} s"
        file.seek(0)
        return Outcome(step.name, status, time.monotonic() - start, file.read())


def summary(outcomes: list[Outcome], timings: Path) -> str:
    """The tables that come last: whole steps beside the peers' by shape and load, then how each step ended."""
    lines = []
    if timings.exists():
        with timings.open(newline="") as file:
            rows = list(csv.DictReader(file))
        lines.append(f"{'shape':<14}{'load':<15}{'what':<31}{'kernels':<12}{'ms':>9} {'of limit':>8}")
        lines += [
            f"{row['shape']:<14}{row['load']:<15}{row['what']:<31}{row['kernels']:<12}"
            f"{row['ms']:>9} {row['of_limit']:>8}"
            for row in rows
            if "backward" in row["what"] or (row["what"].startswith("wgrad") and row["load"] == "even")
        ]
    lines.append(f"\n{'step':<24}{'seconds':>8}  outcome")
    for outcome in outcomes:
        lines.append(f"{outcome.step:<24}{outcome.seconds:8.0f}  {outcome.status}")
        found = [line for line in outcome.output.splitlines() if line.startswith("FAIL") or "ERROR SUMMARY" in line]
        if outcome.status not in ("ok", "no time left"):
            found += outcome.output.splitlines()[-2:]
        lines += [f"    {line[:160]}" for line in found[:5]]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for log.txt and timings.csv")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--unsupported-versions", action="store_true", help="run with a torch or a Triton that fusedmlp refuses, too"
    )
    parser.add_argument("--only", help="steps whose name contains this")
    parsed = parser.parse_args(arguments)
    out = parsed.out.resolve()
    chosen = [step for step in steps(parsed.device, out) if not parsed.only or parsed.only in step.name]
    if not chosen:
        parser.error(f"--only: expected a part of the name of a step; got {parsed.only!r}")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu: expected a GPU; torch finds none. --device cpu tries the steps without one", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * parsed.minutes
    (out / "timings.csv").unlink(missing_ok=True)
    outcomes = []
    with (out / "log.txt").open("w") as log:
        for step in chosen:
            left = deadline - time.monotonic()
            if left > 5:
                outcomes.append(run(step, min(step.seconds, left), parsed.unsupported_versions))
            else:
                outcomes.append(Outcome(step.name, "no time left", 0, ""))
            outcome = outcomes[-1]
            print(f"{outcome.step}: {outcome.status} ({outcome.seconds:.0f} s)", flush=True)
            print(f"== {outcome.step}: {outcome.status}\n{outcome.output}", file=log, flush=True)
    print(summary(outcomes, out / "timings.csv"))
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1
