"""`python -m peers`: Transformers' tests with fusedmlp as the default experts, and with `grouped_mm`.

    PYTHONPATH=tests python -m peers [--part 1/3] [--only Mixtral ...] [--json results.json]

Fails if a test is worse with ours each time that it is run, or if fusedmlp computed no experts of an architecture.
Logs of both runs, with every traceback, are in `build/peers/`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from peers.architectures import ARCHITECTURES, class_name, describe
from peers.compare import OURS, THEIRS, differences, reproduced, status, unused

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "peers"
TEST_SECONDS = 300
LINES = 25  # printed of a traceback


def run(experts: str, tests: list[str], log: str) -> dict[str, dict]:
    """Run tests named `MixtralTest` or `MixtralTest.test_x`; return outcomes by test, of tests that were reached."""
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes = LOGS / f"{log}.jsonl"
    outcomes.unlink(missing_ok=True)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "EXPERTS": experts,
        "HF_HOME": str(ROOT / "build" / "cache" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OUTCOMES": str(outcomes),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
    }
    options = ["-q", "--noconftest", "--disable-warnings", f"--timeout={TEST_SECONDS}", f"--rootdir={ROOT / 'tests'}"]
    plugins = [f"-p{name}" for name in ("peers.plugin", "no:cacheprovider", "no:xdist", "no:benchmark")]
    cases = ROOT / "tests" / "peers" / "cases.py"
    names = [f"{cases}::{test.replace('.', '::')}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, *options, *plugins, *names]
    with open(LOGS / f"{log}.txt", "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        try:
            _report_progress(process, outcomes, experts)
        finally:
            process.kill()
            process.wait()
    if process.returncode not in (0, 1):  # passed, or with failures
        print(f"{experts}: pytest ended with {process.returncode}; see {LOGS / log}.txt", file=sys.stderr)
    return _read(outcomes)


def _read(outcomes):
    if not outcomes.exists():
        return {}
    lines = outcomes.read_text(encoding="utf-8").splitlines(keepends=True)
    return {row["test"]: row for row in map(json.loads, (line for line in lines if line.endswith("\n")))}


def _report_progress(process, outcomes, experts):
    """Print a line for each class of tests when it is over."""
    known: list[str] = []
    while True:
        try:
            ended = process.wait(timeout=2) is not None
        except subprocess.TimeoutExpired:
            ended = False
        rows = list(_read(outcomes).values())
        classes = list(dict.fromkeys(row["test"].split(".")[0] for row in rows))
        for name in classes if ended else classes[:-1]:
            if name not in known:
                known.append(name)
                own = [row for row in rows if row["test"].startswith(name + ".")]
                counts = Counter(row["outcome"] for row in own)
                seconds = sum(row["seconds"] for row in own)
                text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
                print(f"{experts}: {name}: {text} in {seconds:.0f} s", file=sys.stderr, flush=True)
        if ended:
            return


def summary(name: str, theirs: dict[str, dict], ours: dict[str, dict], different: list[str]) -> dict:
    """One architecture's row of the table, and the tests that fail with either experts."""
    row: dict = {"experts": describe(name), "different": different}
    for who, outcomes in ((THEIRS, theirs), (OURS, ours)):
        calls = sum((Counter(outcome["calls"]) for outcome in outcomes.values()), Counter())
        row[who] = {
            "calls": {implementation: calls[implementation] for implementation in (THEIRS, OURS)},
            "seconds": round(sum(outcome["seconds"] for outcome in outcomes.values())),
            **{kind: sum(o["outcome"] == kind for o in outcomes.values()) for kind in ("passed", "skipped", "failed")},
        }
    both = [test for test, outcome in ours.items() if outcome["outcome"] == "failed" and test not in different]
    row["fail either way"] = {test.split(".")[1]: _last_line(ours[test]["why"]) for test in both}
    return row


def _last_line(why):
    lines = [line.removeprefix("E").strip() for line in why.splitlines() if line.startswith("E ")]
    return lines[-1][:200] if lines else ""


def _write(path, rows):
    """Write the results; rows of architectures that were not run stay if their versions are the same."""
    results: dict = {"transformers": version("transformers"), "torch": version("torch").split("+")[0]}
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if results.items() <= before.items():
        rows = before["architectures"] | rows
    results["architectures"] = {name: rows[name] for name in ARCHITECTURES if name in rows}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run and compare; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="1/3: the first of three parts of the architectures")
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), metavar="NAME", help=", ".join(ARCHITECTURES))
    parser.add_argument("--json", type=Path, help="write the table's figures there, for what was run")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    names = (options.only or list(ARCHITECTURES))[part - 1 :: parts]
    classes = [class_name(name) for name in names]

    start = time.monotonic()
    with ThreadPoolExecutor() as pool:  # side by side: each is one process of one thread
        theirs, ours = pool.map(lambda who: run(who, classes, who), (THEIRS, OURS))
    found = differences(theirs, ours)
    same, gone = reproduced(found, lambda tests: (run(THEIRS, tests, "again_theirs"), run(OURS, tests, "again_ours")))

    rows = {}
    for name in names:
        own = [{t: o for t, o in all_.items() if t.startswith(class_name(name) + ".")} for all_ in (theirs, ours)]
        rows[name] = summary(name, *own, [d.test for d in same if d.test.startswith(class_name(name) + ".")])
    if options.json:
        _write(options.json, rows)

    print(f"{'':14}{THEIRS + ' passed':>20}{OURS + ' passed':>20}{'worse':>8}{'fail either way':>18}")
    for name, row in rows.items():
        counts = f"{row[THEIRS]['passed']:20}{row[OURS]['passed']:20}{len(row['different']):8}"
        print(f"{name:14}{counts}{len(row['fail either way']):18}")
    print(f"{time.monotonic() - start:.0f} s")
    for difference in gone:
        print(f"run again, no longer worse: {difference.test}: {difference.theirs}, with ours {difference.ours}")
    for difference in same:
        print(f"\nWORSE, each of 3 times: {difference.test}: {difference.theirs}, with ours {difference.ours}")
        print("\n".join(difference.why.splitlines()[-LINES:]) or "no traceback: it did not end")
    not_used = unused(rows)
    print("\n".join(not_used), end="\n" if not_used else "")
    return status(same, not_used)


if __name__ == "__main__":
    sys.exit(main())
