"""The project's compiled kernels, executed instruction by instruction, in three orders that must give the same bits."""

import pytest
from emulation.layers import emulated

from bench.cases import cases

# The cases for sm_100, few of whose instructions come from other sources than those of sm_90: every pass, all of TF32
# wgrad, and warp-specialized wgrad.
WARP_SPECIALIZED_WGRAD = {
    *("wgrad deep", "wgrad tall", "wgrad of bf16", "wgrad bias"),
    *("wgrad segments", "wgrad tall segments", "wgrad deep segments", "wgrad deep segments overwrite"),
}
PART = [
    case
    for case in cases.cases()
    if case.quick
    or (case.precision == cases.TF32 and "wgrad" in case.name)
    or (case.shape == "long" and case.name in WARP_SPECIALIZED_WGRAD)
]


def is_warp_specialized(case, target):
    """Whether warp-specialized kernels run in the case: long loads in 16 bits by descriptors."""
    unfit = ["odd", "shifted", "without descriptors", "fc1_act in_out"]
    # Only Blackwell's TMA gathers rows, and only those of one segment.
    unfit.append("gathered" if target == "sm_90" else "gathered segments")
    if not case.name.startswith("wgrad"):  # wgrad's main_grad may lie anywhere
        unfit += ["scattered", "misaligned"]
    fits = not any(part in case.name for part in unfit)
    return fits and case.shape == "long" and case.precision in (cases.BF16, cases.FP16)


CELLS = [(target, case, False) for target in ("sm_80", "sm_90") for case in cases.cases()]
CELLS += [("sm_100", case, False) for case in PART]
CELLS += [
    (name, case, True) for name in ("sm_90", "sm_100") for case in cases.cases() if is_warp_specialized(case, name)
]
CELLS += [(name, case, False) for name in ("sm_90", "sm_100") for case in cases.of_recipes(name)]
CASES = [
    pytest.param(
        target,
        case,
        warp_specialized,
        id=f"{target}{'-warp_specialized' * warp_specialized}-{case.id}",
        marks=[] if case.quick and (target != "sm_100" or warp_specialized) else [pytest.mark.exhaustive],
    )
    for target, case, warp_specialized in CELLS
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("target", "case", "warp_specialized"), CASES)
def test_case(target, case, warp_specialized):
    with emulated(target, case.shape, descriptors=case.descriptors, warp_specialized=warp_specialized) as launched:
        case.run()
    assert launched
    assert any("warp_specialized" in launch.kernel for launch in launched) == warp_specialized
