"""The command: its arguments, and its report as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from fusedmlp.command_line import positive
from fusedmlp.memory.layer import Bytes, Layer, modes
from fusedmlp.recipe import DTYPES

_DEFAULTS = {"experts": 64, "hidden": 4096, "ffn": 1024, "tokens": 32768, "top-k": 4, "micro-batches": 4}


def add(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "memory",
        help="bytes of a layer's weights, gradients, temporaries and saved activations, with and without fusedmlp",
        description="By formulas, for one gated layer of tokens: bytes of its weights, of the copies of them that a "
        "recipe multiplies, of gradients, of temporary weight gradients, and of the activations that a forward saves "
        "(with delayed gradients also what the queue holds after all micro-batches), in plain PyTorch and in each "
        "mode of fusedmlp. Not counted: gradients of activations, and 8-bit copies of activations.",
    )
    for name, default in _DEFAULTS.items():
        what = "; of one micro-batch" if name == "tokens" else ""
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"default: {default}{what}")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights"
    )
    parser.add_argument("--recipe", choices=[*DTYPES], help="of grouped_mlp; default: none")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 2 if there is no such layer."""
    sizes = args.experts, args.hidden, args.ffn, args.tokens, args.top_k, args.micro_batches
    dtype: torch.dtype = getattr(torch, args.dtype)
    if args.recipe is not None and dtype not in (torch.float32, DTYPES[args.recipe]):
        print(f"memory: --dtype: expected float32 or that of --recipe {args.recipe}; got {args.dtype}", file=sys.stderr)
        return 2
    if args.top_k > args.experts:
        print(f"memory: --top-k: expected at most --experts {args.experts}; got {args.top_k}", file=sys.stderr)
        return 2
    try:
        found = modes(Layer(*sizes, dtype, args.recipe))
    except ValueError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps([each._asdict() | {"total": each.total} for each in found], indent=2) if args.json else table(found)
    )
    return 0


def table(found: list[Bytes]) -> str:
    """Aligned lines, in MiB."""
    lines = [["mode", *Bytes._fields[1:], "total"]]
    lines += [[each.mode, *(f"{n / 2**20:,.1f}" for n in (*each[1:], each.total))] for each in found]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for mode, *cells in lines:
        columns = zip(cells, widths[1:], strict=True)
        aligned.append("  ".join([mode.ljust(widths[0]), *(cell.rjust(width) for cell, width in columns)]))
    return "\n".join(["MiB of one layer; plain: PyTorch's grouped_mm, without fusedmlp", "", *aligned])
