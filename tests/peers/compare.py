"""Differences between two runs of the same tests, and whether they come again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

OURS, THEIRS = "fusedmlp", "grouped_mm"
MISSING = "missing"  # the run ended before it, or with it
_ORDER = ("passed", "skipped", "failed", MISSING)

Outcomes = Mapping[str, Mapping[str, Any]]  # by test: "outcome", "failures" and "why"


class Difference(NamedTuple):
    """A test with a worse outcome in our run than in theirs, or one that a run lacks."""

    test: str
    theirs: str
    ours: str
    why: str  # the end of our traceback


def differences(theirs: Outcomes, ours: Outcomes) -> list[Difference]:
    """Differences in the order of tests; a test that fails in both runs counts if more subtests fail in ours."""
    found = []
    for test in dict.fromkeys([*theirs, *ours]):
        before, after = (_outcome(outcomes, test) for outcomes in (theirs, ours))
        worse = _ORDER.index(after) > _ORDER.index(before) or MISSING in (before, after)
        if before == after == "failed":
            worse = ours[test]["failures"] > theirs[test]["failures"]
        if worse:
            found.append(Difference(test, before, after, ours[test]["why"] if test in ours else ""))
    return found


def _outcome(outcomes, test):
    return outcomes[test]["outcome"] if test in outcomes else MISSING


def reproduced(
    found: Iterable[Difference], run_again: Callable[[list[str]], tuple[Outcomes, Outcomes]], times: int = 2
) -> tuple[list[Difference], list[Difference]]:
    """(Differences that come every time, differences that once did not); `run_again(tests)` returns (theirs, ours)."""
    same, gone = list(found), []
    for _ in range(times):
        if not same:
            break
        tests = {difference.test for difference in differences(*run_again([difference.test for difference in same]))}
        gone += [difference for difference in same if difference.test not in tests]
        same = [difference for difference in same if difference.test in tests]
    return same, gone


def unused(rows: dict[str, dict]) -> list[str]:
    """Lines about architectures for which a run did not compute experts as it claims to."""
    lines = []
    for name, row in rows.items():
        for who, other in ((OURS, THEIRS), (THEIRS, OURS)):
            calls = row[who]["calls"]
            if calls[who] == 0 or calls[other] != 0:
                lines.append(
                    f"{name}, default {who}: experts computed {calls[who]} times by it, {calls[other]} by {other}"
                )
    return lines


def status(same: list[Difference], not_used: list[str]) -> int:
    """The exit status of a run."""
    return int(bool(same or not_used))
