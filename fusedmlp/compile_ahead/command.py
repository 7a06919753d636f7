"""The command: its arguments, and its report as text or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusedmlp import environment
from fusedmlp.activation import NUMBERS, OPTIONS, Activation
from fusedmlp.command_line import LAYER, lines, positive
from fusedmlp.recipe import DTYPES, WGRADS
from fusedmlp.targets import TARGETS
from fusedmlp.validate import WEIGHT_LAYOUTS

if TYPE_CHECKING:  # modules that need Triton
    from fusedmlp.compile_ahead.jobs import Kernel
    from fusedmlp.compile_ahead.layer import Layer

_FLOATS = ("float32", "bfloat16", "float16")


def add(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile",
        help="compile a layer's kernels into Triton's cache, for a GPU that need not be here",
        description="Compile every kernel that a layer launches in training, so that a job which finds this folder "
        "compiles none of them. Needs no GPU. The folder is Triton's cache: ~/.triton/cache, or where Triton is "
        "told to keep it. Exit status 1 if a kernel does not compile.",
    )
    parser.add_argument("--target", choices=TARGETS, required=True, help="the GPU's architecture")
    for name in ("experts", "hidden", "ffn"):
        parser.add_argument(f"--{name}", type=positive, default=LAYER[name], help=f"default: {LAYER[name]}")
    parser.add_argument("--top-k", type=positive, default=8, help="experts of a token; default: 8")
    parser.add_argument(
        "--tokens", type=positive, action="append", help="of a micro-batch; may be repeated; default: any number"
    )
    parser.add_argument("--dtype", choices=_FLOATS, default="bfloat16", help="of the weights and of the layer's input")
    parser.add_argument("--recipe", choices=[*DTYPES], help="default: none")
    parser.add_argument("--wgrad", choices=WGRADS, default="recipe", help="with an 8-bit recipe; default: recipe")
    parser.add_argument("--activation", default="swiglu", metavar="NAME", help="default: swiglu")
    parser.add_argument("--interleaved", action="store_true", help="gate and linear channels of fc1 alternate")
    for option in NUMBERS:
        default = getattr(Activation, option)  # None: the activation has its own
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=float,
            default=default,
            help=f"of the activation; default: {'its own' if default is None else f'{default:g}'}",
        )
    parser.add_argument("--bias", action="store_true", help="fc1 and fc2 have biases")
    parser.add_argument(
        "--probs",
        choices=(*_FLOATS, "none"),
        default="float32",
        help="dtype of routing probabilities; none: the layer gets rows without any; default: float32",
    )
    parser.add_argument(
        "--weights",
        choices=("packed", "separate", "megatron", "megatron_ddp"),
        default="packed",
        help="how weights and main_grad are stored, as for doctor; default: packed",
    )
    parser.add_argument("--weight-layout", choices=WEIGHT_LAYOUTS, default="out_in", help="default: out_in")
    parser.add_argument(
        "--main-grad",
        choices=(*_FLOATS, "none"),
        default="float32",
        help="dtype of main_grad; none: gradients go to .grad; default: float32",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="as the layer's option of that name")
    parser.add_argument("--delay-wgrad", action="store_true", help="also weight gradients that a WgradQueue delays")
    parser.add_argument("--jobs", type=positive, help="processes that compile; default: one for each core")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, and print the report; 2 if there is no such layer or target, 1 if a kernel does not compile."""
    if environment.triton_interpret():  # before Triton is imported, which then prepares to interpret
        print("compile: expected kernels to be compiled; got TRITON_INTERPRET=1: unset it", file=sys.stderr)
        return 2
    if args.top_k > args.experts:
        print(f"compile: --top-k: expected at most --experts {args.experts}; got {args.top_k}", file=sys.stderr)
        return 2
    import triton  # noqa: F401  # if it is not there, the command line says so

    try:
        from fusedmlp.compile_ahead.compiling import compiling_for
        from fusedmlp.compile_ahead.layer import launches

        target, start = TARGETS[args.target], time.perf_counter()
        with lines(lambda: f"planning: {time.perf_counter() - start:.0f} s"), compiling_for(target):
            planned = launches(_layer(args), target)
    except (NotImplementedError, TypeError, ValueError) as error:
        print(f"compile: {error}", file=sys.stderr)
        return 2
    from fusedmlp.compile_ahead.jobs import CompilerError, compile_all

    jobs, start = args.jobs or len(os.sched_getaffinity(0)), time.perf_counter()
    try:
        kernels = compile_all(planned, target, jobs)
    except CompilerError as error:
        print(f"compile: {error}", file=sys.stderr)
        return 1
    report = _report(args.target, kernels, time.perf_counter() - start)
    print(json.dumps(report, indent=1) if args.json else table(report))
    return 0


def _layer(args: argparse.Namespace) -> Layer:
    from fusedmlp.compile_ahead.layer import Layer

    options = {name: getattr(args, name) for name in OPTIONS}
    return Layer(
        E=args.experts,
        H=args.hidden,
        F=args.ffn,
        K=args.top_k,
        tokens=tuple(args.tokens or ()),
        dtype=getattr(torch, args.dtype),
        activation=Activation(args.activation, **options),
        recipe=args.recipe,
        wgrad=args.wgrad,
        weights=args.weights,
        weight_layout=args.weight_layout,
        bias=args.bias,
        probs=None if args.probs == "none" else getattr(torch, args.probs),
        main_grad=None if args.main_grad == "none" else getattr(torch, args.main_grad),
        delay_wgrad=args.delay_wgrad,
        batch_invariant=args.batch_invariant,
    )


def _report(target: str, kernels: Sequence[Kernel], seconds: float) -> dict[str, Any]:
    from triton import __version__, knobs

    return {
        "target": target,
        "triton": __version__,
        "folder": str(knobs.cache.dir),
        "seconds": round(seconds, 1),
        "compiled": sum(not kernel.was_cached for kernel in kernels),
        "binary_bytes": sum(kernel.binary_bytes for kernel in kernels),
        "file_bytes": sum(kernel.file_bytes for kernel in kernels),
        "kernels": [kernel._asdict() | {"seconds": round(kernel.seconds, 2)} for kernel in kernels],
    }


def table(report: dict[str, Any]) -> str:
    """A line for the kernels of each name and path, then their sum."""
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for kernel in report["kernels"]:
        groups[kernel["name"], kernel["path"]].append(kernel)
    rows: list[tuple[str, ...]] = [("kernel", "path", "kernels", "compiled", "seconds", "KiB of code", "KiB of files")]
    for (name, path), own in groups.items():
        compiled, seconds = sum(not each["was_cached"] for each in own), sum(each["seconds"] for each in own)
        sizes = (sum(each[what] for each in own) / 1024 for what in ("binary_bytes", "file_bytes"))
        rows.append((name, path, str(len(own)), str(compiled), f"{seconds:.1f}", *(f"{size:,.0f}" for size in sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = []
    for name, path, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
        aligned.append("  ".join([name.ljust(widths[0]), path.ljust(widths[1]), *cells]))
    count, compiled = len(report["kernels"]), report["compiled"]
    last = (
        f"{report['target']}, Triton {report['triton']}: {count} kernels, {compiled} of them compiled now, in "
        f"{report['seconds']} s; {report['binary_bytes']:,} bytes of code, {report['file_bytes']:,} of files, in "
        f"{report['folder']}"
    )
    return "\n".join([*aligned, "", last])
