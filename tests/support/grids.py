"""Selects cells of grids of tests.

`make test-all` runs all. With `--part 2/5` it runs enough cells of a grid that every two values that meet in some cell
meet in one of these, since most mistakes need two conditions to show, and the second of each five other cells; with
`--part 0/1` none of the others. With the mark `sparse`, for tests whose cells take seconds, every value is in one of
the cells. Cases with the mark `exhaustive` are among the others. A test that goes through cells of its own has all of
them in the first part alone: see `only_pairs`.

`make test` (`--quick`) runs the same as `--part 0/1`, but for what has the mark `slow`, which takes more than three
seconds on one core.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import astuple

import pytest

_quick = False
_only_pairs = False


def is_quick() -> bool:
    """Whether this run has none of the other cells: `--quick` or `--part 0/1`."""
    return _quick


def only_pairs() -> bool:
    """Tell whether a test runs, of cells of its own, only so many that every two values meet in one."""
    return _only_pairs


def examples(number: int) -> int:
    """The number of random examples of one test to run: a fifth in a quick run."""
    return max(1, number // 5) if _quick else number


def seeds(number: int, some: int) -> list:
    """Parameters `0, 1, ...`. `make test-all` always has the first `some` of them, a quick run a fifth of these."""
    marks = [
        pytest.mark.exhaustive if i >= some else pytest.mark.slow if i >= max(1, some // 5) else ()
        for i in range(number)
    ]
    return [pytest.param(i, marks=mark) for i, mark in enumerate(marks)]


def covering(cells: list[tuple[str, ...]], together: int = 2) -> set[int]:
    """Indices of cells, chosen greedily, so that any `together` values that meet in some cell meet in a chosen one."""
    met = [set(itertools.combinations(enumerate(cell), min(together, len(cell)))) for cell in cells]
    missing, chosen = set().union(*met), set()
    while missing:
        best = max(range(len(cells)), key=lambda i: len(met[i] & missing))
        chosen.add(best)
        missing -= met[best]
    return chosen


def part(cells: list, together: int = 2) -> list:
    """The cells, dataclasses or tuples, that a quick run checks."""
    values = [tuple(map(str, cell if isinstance(cell, tuple) else astuple(cell))) for cell in cells]
    return [cells[i] for i in sorted(covering(values, together))]


def _chosen(grid: list[pytest.Item]) -> set[int]:
    if "[" not in grid[0].nodeid:
        return {0}
    # A cell's id joins the ids of its values; a test without values has no id.
    cells = [tuple(item.callspec.id.split("-")) for item in grid]
    return covering(cells, 1 if grid[0].get_closest_marker("sparse") else 2)


class Grids:
    """The plugin that selects tests, and prints at the end the number of tests and seconds of each folder."""

    def __init__(self, quick: bool, part: str) -> None:
        global _quick, _only_pairs
        self.quick = quick
        self.part, self.parts = map(int, part.split("/"))
        if not 0 <= self.part <= self.parts or self.parts < 1:
            raise pytest.UsageError(f"--part: expected K/N with K from 0 to N; got {part}")
        _quick = quick or not self.part
        _only_pairs = quick or self.part != 1
        self.seconds: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self.quick and self.part == self.parts == 1:
            return
        grids = defaultdict(list)
        for item in items:
            if not item.get_closest_marker("exhaustive") and not (self.quick and item.get_closest_marker("slow")):
                grids[item.nodeid.split("[")[0]].append(item)
        chosen = {id(grid[i]) for grid in grids.values() for i in _chosen(grid)}
        if not self.quick and self.part:
            others = [id(item) for item in items if id(item) not in chosen]
            chosen |= {*others[self.part - 1 :: self.parts]}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.split("::")[0].split("/")
        part = path[1] if len(path) > 2 else "the rest"
        self.seconds[part] += report.duration
        self.numbers[part] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        parts = (f"{part} {self.numbers[part]} in {seconds:.0f} s" for part, seconds in self.seconds.most_common())
        left_out = "; `make test-all` runs the cases that are left out here" if self.quick else ""
        terminalreporter.write_line(f"tests, and seconds in any process: {', '.join(parts)}{left_out}")
