"""The project's compiled kernels, executed instruction by instruction, in three orders that must give the same bits."""

import pytest
from emulation.layers import emulated

from bench.cases import cases

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


def has_tasks(case, target):
    """Whether warp-specialized kernels take a part of the case: long loads in 16 bits by descriptors."""
    unfit = ["odd", "shifted", "without descriptors", "fc1_act in_out"]
    unfit.append("gathered" if target == "sm_90" else "gathered segments")  # Blackwell's TMA follows an index: of one
    if not case.name.startswith("wgrad"):  # whose main_grad may lie anywhere
        unfit += ["scattered", "misaligned"]
    fits = not any(part in case.name for part in unfit)
    return fits and case.shape == "long" and case.precision in (cases.BF16, cases.FP16)


CELLS = [(target, case, False) for target in ("sm_80", "sm_90") for case in cases.cases()]
CELLS += [("sm_100", case, False) for case in PART]
CELLS += [(target, case, True) for target in ("sm_90", "sm_100") for case in cases.cases() if has_tasks(case, target)]
CASES = [
    pytest.param(
        target,
        case,
        specialised,
        id=f"{target}{'-specialised' * specialised}-{case.id}",
        marks=[] if case.quick and (target != "sm_100" or specialised) else [pytest.mark.exhaustive],
    )
    for target, case, specialised in CELLS
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("target", "case", "specialised"), CASES)
def test_case(target, case, specialised):
    with emulated(target, case.shape, descriptors=case.descriptors, specialised=specialised) as launched:
        case.run()
    assert launched
    assert any("specialised" in launch.kernel for launch in launched) == specialised
