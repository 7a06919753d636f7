"""Tables of results: a row a time, in the columns that runs and committed results share."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# "kernels": "default" or "warp_specialized", whichever the layer may use.
COLUMNS = (
    *("kernels", "shape", "load", "what", "ms", "tflops", "gb_s", "of_limit", "joules", "mib", "clock_mhz"),
    *("gpu", "driver", "torch", "triton", "commit", "date"),
)
Key = tuple[str, ...]


class Table:
    """A CSV file that rows are appended to as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any], columns: Iterable[str] = ()) -> None:
        """Write a row at once. Columns are those of the first row, unless they are given; a row may lack some."""
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [*(columns or row)])
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def read(self) -> list[dict[str, str]]:
        """All rows so far."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))


def committed(folder: Path) -> list[dict[str, str]]:
    """Times in a folder's tables. The oldest call the kernels `kind` and name no machine, which `about.json` does."""
    about = {name: str(value) for name, value in json.loads((folder / "about.json").read_text()).items()}
    found = []
    for path in sorted(folder.glob("*.csv")):
        for row in Table(path).read():
            kind = row.get("kind", "").replace("ws", "warp_specialized")
            if {"shape", "load", "what", "ms"} <= set(row) and (kind or row.get("kernels")):
                known = {name: about.get(name, "") for name in ("gpu", "date", "commit")}
                found.append(known | {"kernels": kind, "file": path.name} | row)
    return sorted(found, key=lambda row: row["date"])


def by_key(rows: Iterable[dict[str, str]]) -> dict[Key, dict[str, str]]:
    """Rows with a time by GPU, shape, load, kernels and name; a later row replaces one before.

    Kernels of one step may have equal names: their key ends with the place among these.
    """
    found: dict[Key, dict[str, str]] = {}
    counted: Counter[Key] = Counter()
    for row in rows:
        key = tuple(row[name] for name in ("gpu", "shape", "load", "kernels", "what"))
        if " kernel " in row["what"]:
            counted[own := (*key, row["date"], row["commit"], row.get("file", ""))] += 1
            key = (*key, str(counted[own]))
        if float(row["ms"] or 0):
            found[key] = row
    return found
