"""Costs allowed to compiled kernels, of a step and of a tile: `python -m bench.proof.budgets` writes the table anew.

The table has one launch of each pass, and of its warp-specialized kernel and those of 8-bit recipes where there are
some, with packed weights, `main_grad` in fp32 and sizes that are multiples of 16, in bf16 with the tiles for long
loads, of warp-specialized kernels those for large experts, as the Triton of `constraints.txt` compiles it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from fusedmlp.arguments import without_triton

if __name__ == "__main__" and find_spec("triton") is None:  # the imports below need it
    sys.exit(without_triton("bench.proof.budgets"))

import triton

from bench.proof import cases, main_loop
from bench.proof.compiling import compiled, compiling_for
from fusedmlp.doctor.targets import TARGETS
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.tiles import table

TABLE = Path(__file__).with_name("budgets.csv")
TARGET_NAMES = ("sm_80", "sm_90", "sm_100")
TRITON = "3.7.1"
TOLERANCE = 0.02  # of a number of instructions; compilers schedule a few more or less after any change
_MORE_IS_BETTER = ("mma_in_flight", "loads_in_flight", "joined")

Costs = dict[str, float | None]


def measure(target: str) -> dict[str, Costs]:
    """The numbers of `MainLoop` of each pass; a kernel that is launched twice counts by the first launch."""
    costs = _measure(target, table.PASSES, "", cases.CORE["main_grad"])
    formats: tuple[table.Format, ...] = ("bf16", *table.RECIPES[target])
    for number_format in formats:
        own = {key.kernel for key in table.TABLES[target] if key[1:4] == ("warp_specialized", number_format, "long")}
        passes = [name for name in table.PASSES if name in own]
        of_bf16 = number_format == "bf16"
        suffix = "_warp_specialized" if of_bf16 else f"_{number_format}"
        case = cases.WARP_SPECIALIZED["many rows, wide"]
        if not of_bf16:
            case = cases.eight_bit(number_format)[f"{number_format}, main_grad"]
        if passes:
            costs |= _measure(target, passes, suffix, case)
    return costs


def _measure(
    target: str, passes: Sequence[str], suffix: str, case: Callable[[torch.dtype], cases.Calls]
) -> dict[str, Costs]:
    first: dict[str, Launch] = {}
    planned_for = TARGETS[target].planned_for("long", warp_specialized=bool(suffix))
    for launch in cases.launches(case(torch.bfloat16), planned_for):
        first.setdefault(launch.name, launch)
    kernels = [f"grouped_{name}{suffix}" for name in passes]
    with compiling_for(TARGETS[target]):
        loops = main_loop.of([compiled(first[name]).kernel for name in kernels])
    found = dict(zip(kernels, loops, strict=True))
    costs: dict[str, Costs] = {}
    for name in (f"{name}{suffix}" for name in passes):
        loop = found[f"grouped_{name}"]
        if not isinstance(loop, main_loop.MainLoop):
            raise RuntimeError(f"{name} for {target}: {loop or 'expected a loop that multiplies; found none'}")
        costs[name] = loop._asdict()
    return costs


def allowed(target: str, table: Path = TABLE) -> dict[str, Costs]:
    """Read the committed table, or another; None for a column that an older table lacks."""
    with table.open(encoding="utf-8") as file:
        return {
            row["pass"]: {name: float(row[name]) if row.get(name) else None for name in main_loop.MainLoop._fields}
            for row in csv.DictReader(file)
            if row["gpu"] == target
        }


def changes(before: Mapping[str, Costs], after: Mapping[str, Costs]) -> tuple[list[str], list[str]]:
    """`(worse, only different)`: the numbers that changed, as text."""
    worse: list[str] = []
    different: list[str] = []
    for name, costs in after.items():
        for what, now in costs.items():
            old = before.get(name, {}).get(what)
            slack = TOLERANCE * (old or 0) if what.endswith("instructions") else 0
            if now == old or (now is not None and old is not None and abs(now - old) <= slack):
                continue
            (worse if _is_worse(what, old, now) else different).append(f"{name}: {what} {_text(old)} -> {_text(now)}")
    return worse, different


def _is_worse(what: str, old: float | None, now: float | None) -> bool:
    if old is None or now is None or what == "mma":
        return False  # another way to multiply or to load: the other numbers tell
    return now < old if what in _MORE_IS_BETTER else now > old


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:g}"


def main(arguments: list[str] | None = None) -> int:
    """Write the table and print what it changes."""
    parser = argparse.ArgumentParser(prog="python -m bench.proof.budgets", description=__doc__)
    parser.parse_args(arguments)
    if triton.__version__ != TRITON:
        print(f"budgets: expected Triton {TRITON}; got {triton.__version__}", file=sys.stderr)
        return 2
    measured = {target: measure(target) for target in TARGET_NAMES}
    for target, costs in measured.items():
        worse, different = changes(allowed(target) if TABLE.exists() else {}, costs)
        for line in [f"worse: {line}" for line in worse] + different or ["as before"]:
            print(f"{target} {line}")
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["gpu", "pass", *main_loop.MainLoop._fields])
        for target, costs in measured.items():
            for name, numbers in costs.items():
                writer.writerow([target, name, *("" if n is None else f"{n:g}" for n in numbers.values())])
    return 0


if __name__ == "__main__":
    sys.exit(main())
