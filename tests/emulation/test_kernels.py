"""The project's compiled kernels, executed instruction by instruction, in three orders that must give the same bits."""

import pytest
from cases import cases
from emulation.layers import emulated

# The cases for sm_100, few of whose instructions come from other sources than those of sm_90: every pass, all of TF32
# wgrad, warp-specialized wgrad, and fc1 with both halves of weights [in, out], which goes by TMA there by default.
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
    or case.name == "fc1_act in_out without probs"
]


def is_warp_specialized(case, target):
    """Whether warp-specialized kernels run in the case: long loads in 16 bits by descriptors."""
    unfit = ["odd", "shifted", "without descriptors"]
    if target == "sm_100":  # its TMA gathers rows of one segment
        unfit.append("gathered segments")
    if not case.name.startswith("wgrad"):  # wgrad's main_grad may lie anywhere
        unfit += ["scattered", "misaligned"]
    fits = not any(part in case.name for part in unfit)
    return fits and case.shape == "long" and case.precision in BITS_16


BITS_16 = (cases.BF16, cases.FP16)
# Also with tiles for large experts: other rings and epilogues.
LARGE = {
    *("gemm packed", "gemm deep", "gemm few", "dgrad_act swiglu", "dgrad_act deep", "dgrad_act deep gathered gpt_oss"),
    *("wgrad packed", "wgrad overwrite", "wgrad of bf16", "wgrad in_out", "wgrad reversed", "wgrad scattered"),
    *("wgrad few", "wgrad one", "wgrad tall", "wgrad tall gathered x", "wgrad tall gathered dy bias"),
    *("wgrad many gathered x overwrite", "wgrad deep", "wgrad deep segments", "wgrad deep segments overwrite"),
    *("wgrad deep gathered segments", "wgrad gathered x in_out"),
}
# Target, case, and "", "warp_specialized" or "large".
CELLS = [(target, case, "") for target in ("sm_80", "sm_90") for case in cases.cases()]
CELLS += [("sm_100", case, "") for case in PART]
CELLS += [
    (name, case, "warp_specialized")
    for name in ("sm_90", "sm_100")
    for case in cases.cases()
    if is_warp_specialized(case, name)
]
CELLS += [
    ("sm_90", case, "large")
    for case in cases.cases()
    if is_warp_specialized(case, "sm_90") and case.name in LARGE and case.precision == cases.BF16
]
CELLS += [(name, case, "") for name in ("sm_90", "sm_100") for case in cases.of_recipes(name)]
LARGE_IN_8_BITS = {f"wgrad {name}" for name in ("packed", "in_out", "reversed", "deep", "segments", "many", "few")}
CELLS += [("sm_90", case, "large") for case in cases.of_recipes("sm_90") if case.name in LARGE_IN_8_BITS]
CASES = [
    pytest.param(
        target,
        case,
        kernels,
        id=f"{target}{'-warp_specialized' * bool(kernels)}{'-large' * (kernels == 'large')}-{case.id}",
        marks=[] if case.quick and (target != "sm_100" or kernels) else [pytest.mark.exhaustive],
    )
    for target, case, kernels in CELLS
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("target", "case", "kernels"), CASES)
def test_case(target, case, kernels):
    options = {"warp_specialized": bool(kernels), "large": kernels == "large"}
    with emulated(target, case.shape, descriptors=case.descriptors, **options) as launched:
        case.run()
    assert launched
    assert any("warp_specialized" in launch.kernel for launch in launched) == (
        bool(kernels) and case.precision in BITS_16
    )
