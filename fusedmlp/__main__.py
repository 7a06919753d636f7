"""`python -m fusedmlp COMMAND`.

A command is one function that adds its parser and sets `run`, which takes the parsed arguments and returns the
exit status. A command imports its code when it runs; `kernels` and `bench` find theirs in a clone of the repository.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fusedmlp import bench_command, command_line, environment, memory
from fusedmlp.command_line import without_triton
from fusedmlp.compile_ahead import command as compile_ahead
from fusedmlp.targets import TARGETS
from fusedmlp.version import __version__

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) name; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedmlp", description="fusedmlp on the command line.")
    parser.add_argument("--version", action="version", version=f"fusedmlp {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for add in (_add_demo, _add_doctor, _add_kernels, bench_command.add, memory.add, compile_ahead.add):
        add(commands)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if parsed.run is not _doctor and (wrong := environment.wrong()):  # the doctor reports them
        print("\n".join(wrong.values()), file=sys.stderr)
        return 2
    try:
        status: int = parsed.run(parsed)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        return without_triton(parsed.command)
    return status


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small MoE language model with and without gradient fusion",
        description="Train a small mixture-of-experts language model on Python's language reference twice, with plain "
        "autograd and with fusedmlp, and compare loss, step time, gradient memory, and gradient copies and adds; with "
        "--recipe, on the CPU, also with experts in bf16 and in 8 bits. Exit status 1 if the losses do not agree or "
        "autograd still copies or adds what fusedmlp fuses.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for loss.png and results.json")
    parser.add_argument("--steps", type=command_line.positive, default=200, help="optimizer steps per run")
    parser.add_argument(
        "--recipe", choices=("fp8_block", "mxfp8"), help="also train with experts in bf16 and with this 8-bit recipe"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the data")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu; with --recipe cpu")
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    try:
        from fusedmlp.demo import command
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: {command_line.install(error.name, 'demo')}", file=sys.stderr)
        return 2
    return command.run(args.out, args.steps, args.recipe, args.seed, args.device, args.json)


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run, and why not more",
        description="Report GPU, driver and versions, the kernels and paths that a layer will use and why, the "
        "integrations that can be imported, and a numerical self-test. Exit status 1 if a number is wrong, 2 if "
        "fusedmlp cannot run here as it should.",
    )
    command_line.add_layer(parser)
    parser.add_argument(
        "--weights",
        choices=("packed", "separate", "megatron", "megatron_ddp"),
        default="packed",
        help="how weights and main_grad are stored; megatron_ddp: by Megatron-core without its distributed optimizer",
    )
    parser.add_argument(
        "--weight-layout", choices=("out_in", "in_out"), default="out_in", help="of each weight; default: out_in"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="as the layer's option of that name")
    parser.add_argument("--target", choices=TARGETS, help="GPU to show kernels for; default: the one here, or sm_90")
    parser.add_argument("--json", action="store_true", help="print one object instead of text")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from fusedmlp.doctor import command

    layer = {"E": args.experts, "H": args.hidden, "F": args.ffn, "R": args.rows}
    layer |= {"dtype": args.dtype, "weights": args.weights, "weight_layout": args.weight_layout}
    layer["batch_invariant"] = args.batch_invariant
    return command.run(layer, args.target, args.json)


def _add_kernels(commands: Commands) -> None:
    parser = commands.add_parser(
        "kernels",
        help="compile every kernel for GPUs that need not be present, and check the result",
        description="Compile every kernel in every shipped configuration, as the library launches it, and print "
        "registers, spilled bytes, shared memory, tensor-core and TMA instructions. Needs no GPU. Exit status 1 if any "
        "kernel spills, has wgmma that ptxas serializes or atomics whose order may show in a result, needs more shared "
        "memory than its GPU has, lacks the instructions that it should have (GEMMs in exact fp32 need no tensor "
        "cores), or is other code than the table of hashes has; 2 if kernels cannot be compiled in this process.",
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; default: all of them")
    parser.add_argument(
        "--all-variants",
        action="store_true",
        help="with every combination of optional inputs, layouts and activations, not only the most demanding",
    )
    parser.add_argument("--jobs", type=command_line.positive, help="processes that compile; default: one for each core")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.add_argument(
        "--hashes",
        action="store_true",
        help="without ptxas: print the hash of every launch's PTX or assembly, and compare it with the table of hashes",
    )
    parser.add_argument("--write", action="store_true", help="for --hashes: write the table instead of comparing")
    parser.add_argument("--table", type=Path, metavar="CSV", help="for --hashes: a table other than fusedmlp's own")
    parser.set_defaults(run=_kernels)


def _kernels(args: argparse.Namespace) -> int:
    if environment.triton_interpret():  # before Triton is imported, which then prepares to interpret
        print("kernels: TRITON_INTERPRET=1 runs kernels on the CPU and cannot compile them; unset it", file=sys.stderr)
        return 2
    if (args.write or args.table) and not args.hashes:
        print("kernels: expected --write and --table together with --hashes; got them alone", file=sys.stderr)
        return 2
    if not bench_command.in_clone("kernels"):
        return 2
    command = import_module("bench.proof.command")

    what = args.target, args.jobs, args.json, args.all_variants
    status: int = command.run_hashes(*what, args.write, args.table) if args.hashes else command.run(*what)
    return status


def _process() -> int:
    """Run `main`, and end in at most one line: with the shell's status after an interrupt, or when the reader of the
    output ends early, as in `| head`; with 3 if a file cannot be read or written, as on a full disk.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleans up, too
    try:
        try:
            return main()
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        status = 128 + signal.SIGPIPE
    except OSError as error:
        print(f"fusedmlp: {error}", file=sys.stderr)
        status = 3
    # At exit Python would try to write the rest of its buffer, and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    sys.exit(_process())
