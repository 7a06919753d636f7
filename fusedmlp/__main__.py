"""`python -m fusedmlp COMMAND`.

A command is one function that adds its parser and sets `run`, which takes the parsed arguments and returns the
exit status. It imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) name; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedmlp", description="fusedmlp on the command line.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_demo, _add_tune):
        add(commands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small MoE language model with and without gradient fusion",
        description="Train a small mixture-of-experts language model on Python's language reference twice, with plain "
        "autograd and with fusedmlp, and compare loss, step time, gradient memory, and gradient copies and adds. "
        "Exit status 1 if the loss curves do not agree or autograd still copies or adds what fusedmlp fuses.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for loss.png and results.json")
    parser.add_argument("--steps", type=_positive, help="optimizer steps per run")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the data")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    import torch

    try:
        from fusedmlp.demo import compare, report, train
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: pip install 'fusedmlp[demo]'", file=sys.stderr)
        return 2
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = train.Settings(seed=args.seed, device=device)
    if args.steps is not None:
        settings = train.Settings(steps=args.steps, seed=args.seed, device=device)
    args.out.mkdir(parents=True, exist_ok=True)
    results = compare.compare(settings)
    document = report.as_json(results)
    picture, data = args.out / "loss.png", args.out / "results.json"
    report.draw(results, picture)
    data.write_text(document + "\n", encoding="utf-8")
    print(document if args.json else f"\n{report.table(results)}\n\nWrote {picture} and {data}.")
    return 0 if results.passed else 1


def _add_tune(commands: Commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="look for faster tiles on this GPU",
        description="Time the kernels' tiles for one layer on this GPU, on scratch tensors, and keep the fastest for "
        "FUSEDMLP_TUNED=1. The shipped tiles need no tuning.",
    )
    for name, default in (("experts", 128), ("hidden", 2048), ("ffn", 768), ("rows", 65536)):
        parser.add_argument(f"--{name}", type=_positive, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON instead of a table")
    parser.set_defaults(run=_tune)


def _tune(args: argparse.Namespace) -> int:
    import torch

    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("tune: expected a GPU to time kernels on; this machine has none", file=sys.stderr)
        return 2
    from fusedmlp import autotune

    dtype = getattr(torch, args.dtype)
    problem = autotune.Problem(args.experts, args.hidden, args.ffn, args.rows, dtype, device)
    found = autotune.tune_with_progress(problem)
    path = autotune.save(found, device)
    print(
        autotune.as_json(found)
        if args.json
        else f"{autotune.table(found)}\n\nWrote {path}; use it with FUSEDMLP_TUNED=1."
    )
    return 0


def _positive(argument: str) -> int:
    value = int(argument)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1; got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
