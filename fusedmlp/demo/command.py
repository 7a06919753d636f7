"""`python -m fusedmlp demo`: trains, prints the comparison, and writes its files."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fusedmlp import files
from fusedmlp.demo import compare, report, train


def run(out: Path, steps: int | None, recipe: train.Column | None, seed: int, device: str | None, as_json: bool) -> int:
    """Run the demo; return the exit status. The table is printed before the files in folder `out` are written."""
    device = device or ("cuda" if torch.cuda.is_available() and recipe is None else "cpu")
    wrong = _wrong_device(device)
    if not wrong and (file := next((path for path in (out, *out.parents) if path.is_file()), None)):
        wrong = f"--out: expected a folder; got {out}, where {file} is a file"
    if wrong:
        print(f"demo: {wrong}", file=sys.stderr)
        return 2
    settings = train.Settings(seed=seed, device=device)
    if steps is not None:
        settings = train.Settings(steps=steps, seed=seed, device=device)
    try:
        results = compare.compare(settings, recipe)
    except NotImplementedError as error:  # no kernels of the recipe for this GPU
        print(f"demo: {error}", file=sys.stderr)
        return 2
    document = report.as_json(results)
    print(document if as_json else f"\n{report.table(results)}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    picture, data = out / "loss.png", out / "results.json"
    files.write(picture, report.draw(results))
    files.write(data, document + "\n")
    if not as_json:
        print(f"\nWrote {picture} and {data}.")
    return 0 if results.passed else 1


def _wrong_device(name: str) -> str:
    """The reason why the demo cannot run on a device; empty if it can."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return f"--device: expected cpu, or cuda with or without an index; got {name!r}"
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        return f"--device: expected a device that torch finds; got {name}, and torch finds {gpus} GPUs"
    return ""
