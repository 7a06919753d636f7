"""Everything that needs a GPU: checks of the kernels, then times.

    python -m bench.gpu --out DIR [--minutes 9]     run; again with the same DIR, what is there is not run again
    python -m bench.gpu prepare --out FILE.tar.xz   compile for it, on any machine, and pack
    python -m bench.gpu compare DIR                 compare with the committed results of the same GPU

A machine without network needs Python, PyTorch and a C compiler: unpack the archive there, and start the first command
in its folder. With `--with-triton` the archive has Triton, too. The versions of Triton and the minor version of Python
must be those of the machine that prepared it; else kernels are compiled where they run.

A run writes DIR/timings.csv (a row a time, as it comes), DIR/steps.csv (how each step ended) and DIR/log.txt. Exit
status: 1 if a step failed, of the command `compare` if a time is longer by more than 5%; 2 if there is no GPU.

`--unsupported-versions` is for GPU machines that have nothing newer than torch 2.11 and Triton 3.6: kernels run there,
but the library does not work with them (docs/limits.md), so nothing else may set FUSEDMLP_UNSUPPORTED_VERSIONS.

`--device sm_90` runs without a GPU, on a driver that does nothing: kernels are compiled, launched and not executed.
That checks this program, not the kernels. `--small` has tiny shapes and few cases.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from bench.gpu import compare, jobs, prepare, run

START = time.monotonic()


def _common(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument(
        "--only", metavar="TEXT", nargs="+", default=[""], help="steps whose name contains one of these"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes and few cases, to try this program")


def main(arguments: list[str]) -> int:
    """Command line."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: checks run side by side
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    command = arguments[0] if arguments and arguments[0] in ("prepare", "compare") else ""
    parser = argparse.ArgumentParser(f"bench.gpu {command}".strip(), **style)
    if command == "compare":
        parser.add_argument("folder", type=Path)
        return compare.main(parser.parse_args(arguments[1:]).folder)
    if command == "prepare":
        _common(parser, "archive, .tar.xz, .tar.gz or .tar")
        parser.add_argument("--target", default="sm_90", choices=jobs.TARGETS, help="GPU that kernels are compiled for")
        parser.add_argument("--with-triton", action="store_true", help="pack the installed Triton, too")
        parsed = parser.parse_args(arguments[1:])
        chosen = _chosen(parser, parsed.only, jobs.steps(parsed.target, parsed.small, large_peers=False))
        return prepare.main(parsed.out, chosen, parsed.target, parsed.jobs, parsed.with_triton)
    _common(parser, "folder for timings.csv, steps.csv and log.txt")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together; then all is ended")
    parser.add_argument("--fresh", action="store_true", help="run again what DIR already has")
    parser.add_argument("--device", default="cuda", choices=("cuda", *jobs.TARGETS), help="see above")
    parser.add_argument(
        "--unsupported-versions", action="store_true", help="run with a torch or a Triton that fusedmlp refuses, too"
    )
    parsed = parser.parse_args(arguments)
    os.environ["FUSEDMLP_UNSUPPORTED_VERSIONS"] = str(int(parsed.unsupported_versions))
    chosen = _chosen(parser, parsed.only, jobs.steps(parsed.device, parsed.small, large_peers=parsed.device == "cuda"))
    deadline = START + 60 * parsed.minutes
    out, many = parsed.out.resolve(), parsed.jobs
    return run.everything(chosen, out, parsed.device, deadline, many, parsed.fresh, parsed.small)


def _chosen(parser: argparse.ArgumentParser, only: list[str], steps: list[jobs.Step]) -> list[jobs.Step]:
    for text in only:
        if not any(text in step.name for step in steps):
            parser.error(f"--only: expected a part of the name of a step; got {text!r}")
    return [step for step in steps if any(text in step.name for text in only)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
