"""The project's compiled kernels, executed instruction by instruction, in three orders that must give the same bits."""

import pytest
from emulator import cases
from emulator.layers import emulated
from emulator.library import EmulationError

TARGETS = ("sm_80", "sm_90", "sm_100")
# Products that sum over rows which TMA brings, in TF32: Triton 3.7 makes wrong code of them for sm_100
# (test_known_tensor_memory.py) but with num_stages=1.
WRONG_CODE = [
    *("wgrad packed", "wgrad overwrite", "wgrad in_out", "wgrad segments", "wgrad tall", "wgrad tall segments"),
    "grouped_mlp",
]


def marks(target, case):
    wrong = target == "sm_100" and case.precision == cases.TF32 and case.name in WRONG_CODE
    # Of sm_100, bf16 only, so that a quick run stays one.
    quick = case.quick and (target != "sm_100" or case.precision == cases.BF16)
    return [
        *([pytest.mark.xfail(raises=EmulationError, strict=True, reason="Triton's code is wrong")] if wrong else []),
        *([] if quick else [pytest.mark.exhaustive]),
    ]


CASES = [
    pytest.param(target, case, id=f"{target}-{case.id}", marks=marks(target, case))
    for target in TARGETS
    for case in cases.cases()
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("target", "case"), CASES)
def test_case(target, case):
    with emulated(target, case.shape, descriptors=case.descriptors) as launched:
        case.run()
    assert launched
