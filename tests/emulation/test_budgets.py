"""Costs of a launch of each pass equal those of the table: worse ones are a mistake, better ones need a new table."""

import pytest
from emulation import budgets

QUICK = {("sm_90", "wgrad"), ("sm_90", "fc1_act"), ("sm_80", "gemm")}
PASSES = [
    pytest.param(target, name, id=f"{target}-{name}", marks=[] if (target, name) in QUICK else [pytest.mark.exhaustive])
    for target, name in budgets.everything()
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("target", "name"), PASSES)
def test_a_launch_costs_what_the_table_allows(target, name):
    allowed, measured = budgets.allowed()[target, name], budgets.measure(target, name)
    for counter, most in allowed.items():
        got = measured[counter]
        assert got <= most * (1 + budgets.TOLERANCE), f"{counter}: {most} allowed, {got} counted"
        assert got >= most * (1 - budgets.TOLERANCE), (
            f"{counter}: {most} allowed, {got} counted: better; `python -m emulation.budgets` writes it into the table"
        )


def test_every_pass_is_in_the_table():
    assert list(budgets.allowed()) == list(budgets.everything())
