"""The comparison of two runs of Transformers' tests; `make peers` runs these."""

import pytest
from peers import compare


def outcomes(**tests):
    """Outcomes by test, with the number of its phases and subtests that failed."""
    rows = {
        test: found if isinstance(found, tuple) else (found, int(found == "failed")) for test, found in tests.items()
    }
    return {test: {"outcome": found, "failures": count, "why": f"of {test}"} for test, (found, count) in rows.items()}


@pytest.mark.parametrize(
    ("theirs", "ours", "worse"),
    [
        ("passed", "passed", False),
        ("passed", "failed", True),
        ("passed", "skipped", True),
        ("skipped", "failed", True),
        ("skipped", "skipped", False),
        ("skipped", "passed", False),
        ("failed", "failed", False),
        ("failed", "passed", False),
        ("failed", "skipped", False),
        (("failed", 1), ("failed", 2), True),
        (("failed", 2), ("failed", 1), False),
    ],
)
def test_what_is_worse_with_ours(theirs, ours, worse):
    found = compare.differences(outcomes(a="passed", b=theirs), outcomes(a="passed", b=ours))
    assert [(difference.test, difference.why) for difference in found] == [("b", "of b")] * worse


@pytest.mark.parametrize("outcome", ["passed", "skipped", "failed"])
def test_a_test_that_one_run_lacks_counts(outcome):
    """Either run may have crashed before that test."""
    (lost,) = compare.differences(outcomes(a="passed", b=outcome), outcomes(a="passed"))
    assert (lost.test, lost.theirs, lost.ours, lost.why) == ("b", outcome, compare.MISSING, "")
    (lost,) = compare.differences(outcomes(a="passed"), outcomes(a="passed", b=outcome))
    assert (lost.test, lost.theirs, lost.ours) == ("b", compare.MISSING, outcome)


def test_a_difference_counts_if_it_is_there_each_time():
    good, bad = outcomes(a="passed", b="passed", c="passed"), outcomes(a="failed", b="failed", c="passed")
    runs, asked = iter([(good, bad), (good, outcomes(a="failed", b="passed"))]), []

    def run_again(tests):
        asked.append(tests)
        return tuple({test: found[test] for test in tests} for found in next(runs))

    same, gone = compare.reproduced(compare.differences(good, bad), run_again)
    assert asked == [["a", "b"]] * 2
    assert [difference.test for difference in same] == ["a"]
    assert [difference.test for difference in gone] == ["b"]


def test_nothing_is_run_again_without_a_difference():
    assert compare.reproduced([], lambda tests: pytest.fail("run again")) == ([], [])


@pytest.mark.parametrize(
    ("theirs", "ours", "lines"),
    [
        ({"grouped_mm": 3, "fusedmlp": 0}, {"grouped_mm": 0, "fusedmlp": 3}, 0),
        ({"grouped_mm": 3, "fusedmlp": 0}, {"grouped_mm": 0, "fusedmlp": 0}, 1),
        ({"grouped_mm": 3, "fusedmlp": 0}, {"grouped_mm": 3, "fusedmlp": 3}, 1),
        ({"grouped_mm": 0, "fusedmlp": 3}, {"grouped_mm": 0, "fusedmlp": 3}, 1),
    ],
)
def test_a_run_whose_experts_others_computed_is_named(theirs, ours, lines):
    found = compare.unused({"Mixtral": {"grouped_mm": {"calls": theirs}, "fusedmlp": {"calls": ours}}})
    assert len(found) == lines
    assert all(line.startswith("Mixtral, ") for line in found)


def test_the_exit_status():
    difference = compare.Difference("a", "passed", "failed", "")
    assert compare.status([], []) == 0
    assert compare.status([difference], []) == 1
    assert compare.status([], ["Mixtral, default fusedmlp: ..."]) == 1
