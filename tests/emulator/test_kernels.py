"""The project's compiled kernels, executed instruction by instruction, in three orders that must give the same bits."""

import pytest
from emulator import cases
from emulator.layers import emulated

TARGETS = ("sm_80", "sm_90")
CASES = [
    pytest.param(target, case, id=f"{target}-{case.id}", marks=[] if case.quick else [pytest.mark.exhaustive])
    for target in TARGETS
    for case in cases.cases()
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("target", "case"), CASES)
def test_case(target, case):
    with emulated(target, case.shape, descriptors=case.descriptors) as launched:
        case.run()
    assert launched
