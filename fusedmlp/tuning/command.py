"""`python -m fusedmlp tune`: prints progress, and the tiles found as text or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from fusedmlp import environment
from fusedmlp.kernels.tiles import tuned
from fusedmlp.kernels.tiles.table import Tile
from fusedmlp.tuning.tuner import Found, Problem, tune


def run(problem: Problem, as_json: bool) -> None:
    """Tune for `problem`, save the tiles found, and print them.

    Raises:
        ValueError: the file of tiles is of another version.
    """
    path = tuned.tiles_file(environment.cache_folder(), problem.device)
    if path.exists():
        tuned.read(path)  # an error must not come after the search
    found = _tune_with_progress(problem)
    tuned.save(path, {f.key: f.tile for f in found})
    print(_as_json(found) if as_json else f"{_table(found)}\n\nWrote {path}; use it with FUSEDMLP_TUNED=1.")


def _tune_with_progress(problem: Problem) -> list[Found]:
    """Run `tune`; print a line on stderr for every tile found, and a bar of the trials if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        tqdm = None
    found: list[Found] = []
    bar = None if tqdm is None else tqdm(unit="tile", file=sys.stderr, disable=None)
    for step in tune(problem):
        if isinstance(step, Found):
            found.append(step)
            print(f"{_name(step)}: {step.shipped_ms:.4f} -> {step.ms:.4f} ms", file=sys.stderr)
        elif bar is not None:
            bar.update()
            outcome = step.note if step.ms is None else f"{step.ms:.4f} ms"
            bar.set_description(f"{step.key.kernel}: {_short(step.tile)}: {outcome}")
    if bar is not None:
        bar.close()
    return found


def _name(found: Found) -> str:
    return found.key.kernel + " warp_specialized" * (found.key.path == "warp_specialized")


def _short(tile: Tile) -> str:
    return " ".join(
        f"{name.removeprefix('BLOCK_').removeprefix('num_')}={value}" for name, value in tile._asdict().items()
    )


def _table(found: list[Found]) -> str:
    """Format the tiles found, one kernel a line."""
    header = f"{'kernel':10} {'path':11} {'shipped, ms':>12} {'tuned, ms':>12}  tile"
    lines = [f"{f.key.kernel:10} {f.key.path:11} {f.shipped_ms:12.4f} {f.ms:12.4f}  {_short(f.tile)}" for f in found]
    return "\n".join([header, *lines])


def _as_json(found: list[Found]) -> str:
    """Format the tiles found as a list of objects with the fields of `Found`."""
    tuples = ("key", "shipped", "tile")
    return json.dumps([asdict(f) | {name: getattr(f, name)._asdict() for name in tuples} for f in found], indent=1)
