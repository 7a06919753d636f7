"""Everything that needs a GPU: checks of the kernels, then times.

    python -m bench.gpu --out DIR [--minutes 9]     run; again with the same DIR, what is there is not run again
    python -m bench.gpu stacks --out DIR            train whole models with Transformers and others
    python -m bench.gpu prepare --out FILE.tar.xz   compile for it, on any machine, and pack
    python -m bench.gpu compare DIR                 compare with the committed results of the same GPU

A machine without network needs Python, PyTorch and a C compiler: unpack the archive there, and start the first command
in its folder. With `--with-triton` the archive has Triton, too. The versions of Triton and the minor version of Python
must be those of the machine that prepared it; else kernels are compiled where they run.

A run writes DIR/timings.csv (a row a time, as it comes), DIR/stacks.csv (a row a training), DIR/steps.csv (how each
step ended) and DIR/log.txt. Exit status: 1 if a step failed, of the command `compare` if a time is longer by more than
5%; 2 if there is no GPU.

`--unsupported-versions` is for GPU machines that have nothing newer than torch 2.11 and Triton 3.6: kernels run there,
but the library does not work with them (docs/limits.md), so nothing else may set FUSEDMLP_UNSUPPORTED_VERSIONS.

`--device sm_90` runs without a GPU, on a driver that does nothing: kernels are compiled, launched and not executed.
That checks this program, not the kernels. `--small` has tiny shapes and few cases. `stacks --rehearse` trains tiny
models on the CPU, and compares gradients as on a GPU.
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


def _small(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="tiny shapes and few cases, to try this program")


def main(arguments: list[str]) -> int:
    """Command line."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: checks run side by side
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    command = arguments[0] if arguments and arguments[0] in ("prepare", "compare", "stacks") else ""
    parser = argparse.ArgumentParser(f"bench.gpu {command}".strip(), **style)
    if command == "compare":
        parser.add_argument("folder", type=Path)
        return compare.main(parser.parse_args(arguments[1:]).folder)
    if command == "stacks":
        return _stacks(parser, arguments[1:])
    if command == "prepare":
        _common(parser, "archive, .tar.xz, .tar.gz or .tar")
        _small(parser)
        parser.add_argument("--target", default="sm_90", choices=jobs.TARGETS, help="GPU that kernels are compiled for")
        parser.add_argument("--with-triton", action="store_true", help="pack the installed Triton, too")
        parser.add_argument(
            "--with-stacks", metavar="MIB", type=float, default=0, help="pack what stacks import, up to so many MiB"
        )
        parsed = parser.parse_args(arguments[1:])
        chosen = _chosen(parser, parsed.only, jobs.steps(parsed.target, parsed.small, large_peers=False))
        return prepare.main(parsed.out, chosen, parsed.target, parsed.jobs, parsed.with_triton, parsed.with_stacks)
    _common(parser, "folder for timings.csv, stacks.csv, steps.csv and log.txt")
    _small(parser)
    _limits(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", *jobs.TARGETS), help="see above")
    parsed = parser.parse_args(arguments)
    steps = jobs.steps(parsed.device, parsed.small, large_peers=parsed.device == "cuda")
    return _run(parser, parsed, steps, parsed.device, parsed.small)


def _limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together; then all is ended")
    parser.add_argument("--fresh", action="store_true", help="run again what DIR already has")
    parser.add_argument(
        "--unsupported-versions", action="store_true", help="run with a torch or a Triton that fusedmlp refuses, too"
    )


def _stacks(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    _common(parser, "folder for stacks.csv, steps.csv and log.txt")
    _limits(parser)
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, to try this program")
    parsed = parser.parse_args(arguments)
    device = "cpu" if parsed.rehearse else "cuda"
    return _run(parser, parsed, jobs.stacks(device), device, small=parsed.rehearse)


def _run(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, steps: list[jobs.Step], device: str, small: bool
) -> int:
    os.environ["FUSEDMLP_UNSUPPORTED_VERSIONS"] = str(int(parsed.unsupported_versions))
    deadline, chosen = START + 60 * parsed.minutes, _chosen(parser, parsed.only, steps)
    return run.everything(chosen, parsed.out.resolve(), device, deadline, parsed.jobs, parsed.fresh, small)


def _chosen(parser: argparse.ArgumentParser, only: list[str], steps: list[jobs.Step]) -> list[jobs.Step]:
    for text in only:
        if not any(text in step.name for step in steps):
            parser.error(f"--only: expected a part of the name of a step; got {text!r}")
    return [step for step in steps if any(text in step.name for text in only)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
