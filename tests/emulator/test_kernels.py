"""The project's compiled kernels, executed instruction by instruction, in three orders that must give the same bits."""

import pytest
from emulator import cases
from emulator.layers import emulated

# Of sm_100, where few instructions come from other sources than of sm_90: every pass; all of TF32 wgrad, and what wgrad
# does by warps with tasks of their own.
WARPS_WITH_TASKS = {
    *("wgrad deep", "wgrad tall", "wgrad of bf16", "wgrad bias"),
    *("wgrad segments", "wgrad tall segments", "wgrad deep segments", "wgrad deep segments overwrite"),
}
PART = [
    case
    for case in cases.cases()
    if case.quick
    or (case.precision == cases.TF32 and "wgrad" in case.name)
    or (case.shape == "long" and case.name in WARPS_WITH_TASKS)
]
CELLS = [(target, case) for target in ("sm_80", "sm_90") for case in cases.cases()]
CELLS += [("sm_100", case) for case in PART]
CASES = [
    pytest.param(
        target,
        case,
        id=f"{target}-{case.id}",
        marks=[] if case.quick and target != "sm_100" else [pytest.mark.exhaustive],
    )
    for target, case in CELLS
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("target", "case"), CASES)
def test_case(target, case):
    with emulated(target, case.shape, descriptors=case.descriptors) as launched:
        case.run()
    assert launched
