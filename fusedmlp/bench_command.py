"""`python -m fusedmlp bench`: its options, and which report has which."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fusedmlp import command_line
from fusedmlp.targets import TARGETS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="comparisons with peers, limit times of every pass, and the balance of schedules",
        description="Limits, computed from shapes and datasheets; with a GPU, also measured times beside the limits "
        "measured in the same run. Every shape comes with even loads, Zipf-skewed ones and a quarter of the experts "
        "empty.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--roofline", action="store_true", help="FLOPs, bytes and limit times of every pass")
    what.add_argument("--schedule", action="store_true", help="multiprocessor time that every pass leaves idle")
    what.add_argument("--report", type=Path, metavar="DIR", help="run comparisons with peers; write a page to DIR")
    parser.add_argument("--eight-bit", action="store_true", help="for --roofline: layers with 8-bit recipes")
    for name, default in command_line.LAYER.items():
        parser.add_argument(
            f"--{name}", type=command_line.positive, help=f"your layer, with even loads; default: {default}"
        )
    parser.add_argument("--target", choices=TARGETS, help="GPUs of this architecture alone; not for --report")
    parser.add_argument("--results", type=Path, help="for --report: JSON of `pytest bench`, or CSV of --report")
    parser.add_argument("--tiny", action="store_true", help="for --report: one tiny layer, to try it")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.set_defaults(run=_bench)


# Options that each report has; others would do nothing.
_SCOPE = {*command_line.LAYER, "target"}
_REPORTS = {"roofline": {*_SCOPE, "eight_bit"}, "schedule": _SCOPE, "report": {"results", "tiny"}}


def _bench(args: argparse.Namespace) -> int:
    what = next(name for name in _REPORTS if getattr(args, name))
    given = {name for names in _REPORTS.values() for name in names if getattr(args, name) not in (None, False)}
    if unused := given - _REPORTS[what]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(unused))
        print(f"bench --{what}: expected no {named}, which does nothing here", file=sys.stderr)
        return 2
    if not in_clone("bench"):
        return 2
    if args.report is not None:
        try:
            report = import_module("bench.report.command")
        except ModuleNotFoundError as error:
            print(f"bench --report needs {error.name}: {command_line.install(error.name, 'bench')}", file=sys.stderr)
            return 2
        status: int = report.run(args.report, args.results, args.tiny, args.json)
        return status
    command, scope = import_module("bench.limits.command"), import_module("bench.limits.scope")
    layer = tuple(getattr(args, name) or default for name, default in command_line.LAYER.items())
    try:
        chosen = scope.of(layer if given & {*command_line.LAYER} else None, args.target)
        command.run("eight_bit" if args.eight_bit else what, args.json, chosen)
    except ValueError as error:
        print(f"bench --{what}: {error}", file=sys.stderr)
        return 2
    return 0


def in_clone(command: str) -> bool:
    """Make `bench/` importable and return True in a clone of the repository; elsewhere print an error."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench" / "proof" / "command.py").is_file():
        print(
            f"{command}: expected a clone of fusedmlp's repository, whose bench/ it runs; got an installed package, in "
            f"{root}. In a clone: python -m fusedmlp {command}",
            file=sys.stderr,
        )
        return False
    if str(root) not in sys.path:  # an editable install finds fusedmlp alone
        sys.path.insert(0, str(root))
    return True
