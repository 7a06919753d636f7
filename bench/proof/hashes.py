"""Hashes of the code of every launch: `hashes.csv` has those of each Triton that fusedmlp is tested with.

They show that a change only moves source: to another file, into a function, under another name of a variable. A hash
changes with an instruction, a register, a label, a constant and the name of a kernel, but not with lines, files,
modules and the functions that a kernel calls, which Triton inlines. A row is a launch that the proof compiles, named as
in its table; launches of one name are numbered. `make hashes` writes the table anew.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.proof.proof import Row
from fusedmlp.versions import TESTED

TABLE = Path(__file__).with_name("hashes.csv")
TRITONS = TESTED["triton"]
# Target, kernel and Triton whose code differs from one compilation to the next, unchanged source or not: no hash.
VARY = {("gfx950", "dgrad_act_quantize", "3.9.0")}
MEND = (
    "Source that only moves changes no hash. If the code was to change, `make hashes` writes the table anew; "
    "the commit says why."
)


class Launch(NamedTuple):
    """The name of a launch: the first columns of the table."""

    target: str
    dtype: str
    kernel: str
    config: str


Hashes = dict[Launch, str]


def of(rows: Iterable[Row], triton: str = "") -> Hashes:
    """The hashes of rows, but for those that did not compile, or whose code varies with that Triton."""
    seen: Counter[Launch] = Counter()
    hashes: Hashes = {}
    for row in rows:
        launch = Launch(row.target, row.dtype, row.kernel, row.config)
        seen[launch] += 1
        if seen[launch] > 1:
            launch = launch._replace(config=f"{row.config} #{seen[launch]}")
        if row.hash and (row.target, row.kernel, triton) not in VARY:
            hashes[launch] = row.hash
    return hashes


def read(triton: str, targets: Collection[str], table: Path = TABLE) -> Hashes:
    """Read the hashes of the targets from a Triton's column of the table; empty if there is no table yet."""
    rows = ((launch, hashes.get(triton)) for launch, hashes in _rows(table).items() if launch.target in targets)
    return {launch: found for launch, found in rows if found}


def differences(before: Hashes, after: Hashes, *, part: bool = False) -> Iterator[str]:
    """A line for each launch whose hash differs; with `part`, `after` need not have every launch."""
    for launch in sorted(before.keys() | after.keys()):
        old, new = before.get(launch), after.get(launch)
        if old == new or (part and new is None):
            continue
        change = "not in the table" if old is None else f"{old} -> {new}" if new else "in the table, and not launched"
        yield f"{' '.join(launch)}: {change}"


def write(triton: str, found: Hashes, targets: Collection[str], table: Path = TABLE) -> None:
    """Put what a Triton compiled for the targets into its column. Other columns and targets stay."""
    rows = _rows(table)
    for launch, hashes in rows.items():
        if launch.target in targets:
            hashes.pop(triton, None)
    for launch, new in found.items():
        rows[launch][triton] = new
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Launch._fields, *TRITONS])
        for launch, hashes in sorted(rows.items()):
            if any(hashes.values()):
                writer.writerow([*launch, *(hashes.get(version, "") for version in TRITONS)])


def _rows(table: Path) -> defaultdict[Launch, dict[str, str]]:
    rows: defaultdict[Launch, dict[str, str]] = defaultdict(dict)
    if table.exists():
        with table.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                rows[Launch(*(row.pop(name) for name in Launch._fields))] = row
    return rows
