"""Train with one stack: `python -m bench.gpu.stacks STACK WIDTHS [--compiled]`; rows go to stacks.csv."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from bench.gpu.rows import Table
from bench.gpu.stacks import training
from bench.gpu.stacks.widths import WIDTHS

# The stacks, and the packages whose version their rows have.
STACKS = {"transformers": "transformers", "megatron": "megatron-core", "torchtitan": "torchtitan", "ddp": "torch"}
COLUMNS = (
    *("stack", "model", "experts", "mode", "tokens", "ms", "experts_ms", "mib", "first_loss", "last_loss", "agrees"),
    *("gpu", "driver", "torch", "triton", "version", "commit", "date"),
)


def main(arguments: list[str]) -> int:
    """Command line; returns 1 if a training failed, or its gradients differ from those of the stack's own experts.

    Without results of those, which come first, "agrees" is left empty.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stack", choices=STACKS)
    parser.add_argument("widths", choices=WIDTHS)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny widths")
    parsed = parser.parse_args(arguments)
    out, widths = Path(os.environ["BENCH_GPU_OUT"]), WIDTHS[parsed.widths]
    if parsed.device == "cpu":
        widths = widths.tiny
    stack = import_module(f"bench.gpu.stacks.{parsed.stack}")
    mode = "compiled" if parsed.compiled else "eager"
    fixed = {"stack": parsed.stack, "model": widths.name, "mode": mode}
    fixed["tokens"] = training.MICRO_BATCHES * widths.batch * widths.length
    fixed |= json.loads((out / "machine.json").read_text()) | {"version": version(STACKS[parsed.stack])}
    own, failed = None, 0
    for number, (name, build) in enumerate(stack.variants(widths, parsed.device, parsed.compiled).items()):
        try:
            found = training.run(build, widths, parsed.device, parsed.compiled)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        own = found if number == 0 else own
        differs = training.differ(own, found) if own else ""
        if differs:
            failed += 1
            print(f"FAIL {name}: {differs}")
        row = {"experts": name, "ms": round(found.ms, 3), "mib": found.mib, "agrees": not differs if own else None}
        row |= {"first_loss": round(found.losses[0], 4), "last_loss": round(found.losses[-1], 4)}
        row["experts_ms"] = None if found.experts_ms is None else round(found.experts_ms, 3)
        Table(out / "stacks.csv").append({**fixed, **row}, COLUMNS)
        print(row, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
