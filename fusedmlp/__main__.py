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
    for add in (_add_demo,):
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


def _positive(argument: str) -> int:
    value = int(argument)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1; got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
