"""Compiled kernels with one instruction weakened: each is noticed, or the instruction is known to be needless."""

import re

import pytest
from emulation.mutations import KINDS, LATE, SUBJECTS, described, noticed
from support.grids import is_quick

pytestmark = pytest.mark.usefixtures("poison")

FP8_BLOCK = ("gemm_fp8_block", "fc1_act_fp8_block", "wgrad_fp8_block")
BEGUN_ANEW = "tcgen05 sum begun anew or not"
OF_COPIES = {"copies' arrival removed", "copied bytes"}
SM_100_WARP_SPECIALIZED = (
    *("gemm", "fc1_act", "fc1_gathered", "dgrad_act", "wgrad", "wgrad_gathered"),
    *("gemm_mxfp8", "fc1_act_mxfp8", "wgrad_mxfp8"),
)
MOST = 3  # places of a kind in a kernel: the first, the last and some between
# The number of places whose change leaves nothing wrong, or nothing that a late order shows.
NEEDLESS = {
    # Before accumulators are copied to shared memory: the bytes that this overwrites were read before the barrier at
    # the end of the last step.
    ("sm_80_wgrad", "bar.sync removed"): 1,
    # After a loop whose last step has waited for all MMAs.
    **{(f"sm_90_{name}", "wgmma wait one short"): 1 for name in ("matmul", "gemm", "dgrad", "wgrad", "wgrad_gathered")},
    # After the loop of bias sums: copies in flight go where nothing reads before the next wait.
    ("sm_90_wgrad_gathered", "cp.async wait one short"): 1,
    # Before a part is overwritten: each thread overwrites what it alone has read.
    ("sm_90_staged_dgrad_act_quantize", "bar.sync removed"): 1,
    # Coordinates of the last columns of a tile, which lie outside of dw or y.
    ("sm_90_wgrad", "TMA coordinate"): 1,
    ("sm_100_wgrad", "TMA coordinate"): 1,
    ("sm_100_gemm", "TMA coordinate"): 1,
    # Around zeros in accumulators before the first tile: nothing used these before, and all warps meet afterwards.
    ("sm_100_wgrad", "bar.sync removed"): 1,
    ("sm_100_wgrad", "mbarrier wait removed"): 1,
    # The same; and where a wait until accumulators are read becomes a wait for the MMAs of the tile before, which end
    # so late in this order that the accumulators have been read.
    ("sm_100_wgrad", "mbarrier wait for another stage"): 2,
    # Warp-specialized: after mbarriers are made, as a barrier of the block follows; before all partitions meet, or wait
    # for operands; and after the last wait for stores.
    **{
        (f"sm_90_{name}_warp_specialized", "proxy fence removed"): 1
        for name in (
            "gemm",
            "fc1_act",
            "dgrad_act",
            "wgrad",
            "wgrad_by_tma",
            "fc1_gathered",
            "wgrad_gathered_x",
            *FP8_BLOCK,
        )
    },
    **{
        (f"sm_90_{name}_warp_specialized", "bar.sync removed"): 1
        for name in ("gemm", "fc1_act", "wgrad", "wgrad_by_tma", "gemm_fp8_block", "wgrad_fp8_block")
    },
    ("sm_90_fc1_act_fp8_block_warp_specialized", "bar.sync removed"): 5,
    ("sm_90_dgrad_act_warp_specialized", "bar.sync removed"): 3,
    # Between a wait for operands and what was read before, or between the two halves of a load.
    ("sm_90_fc1_gathered_warp_specialized", "bar.sync removed"): 1,
    ("sm_90_wgrad_gathered_x_warp_specialized", "bar.sync removed"): 1,
    # At the end, where all stores have been waited for.
    **{(f"sm_90_{name}_warp_specialized", "bulk store wait one short"): 2 for name in ("wgrad", "wgrad_gathered_x")},
    # The first MMA of every sum ignores what its registers held.
    **{(f"sm_90_{name}_warp_specialized", "wgmma fence removed"): MOST for name in FP8_BLOCK},
    # The last columns of a tile, as above, of which nothing is stored, either.
    ("sm_90_dgrad_act_warp_specialized", "TMA coordinate"): 1,
    ("sm_90_wgrad_warp_specialized", "TMA coordinate"): 1,
    ("sm_90_wgrad_by_tma_warp_specialized", "TMA coordinate"): 1,
    ("sm_90_wgrad_gathered_x_warp_specialized", "TMA coordinate"): 1,
    ("sm_90_dgrad_act_warp_specialized", "bulk store wait one short"): 1,
    # On sm_100 the same, and around the address of tensor memory, which nothing overwrites; an accumulator is released
    # as a whole after its last subtile, and by then the others have been used.
    **{(f"sm_100_{name}_warp_specialized", "proxy fence removed"): 1 for name in SM_100_WARP_SPECIALIZED},
    **{(f"sm_100_{name}_warp_specialized", "tcgen05 wait for loads removed"): 2 for name in SM_100_WARP_SPECIALIZED},
    **{(f"sm_100_{name}_warp_specialized", "bar.sync removed"): 1 for name in SM_100_WARP_SPECIALIZED},
    # Also before the store of a tile's last subtile, which a late order shows too late, and a random one shows.
    **{
        (f"sm_100_{name}_warp_specialized", "bar.sync removed"): 2
        for name in ("gemm", "dgrad_act", "wgrad", "wgrad_gathered", "gemm_mxfp8")
    },
    # With four stages: the producer waits for the stage after its own, whose MMA is a later one. After the last stage
    # lies another mbarrier, which ends in time here; the stage's own was waited for one step before.
    **{
        (f"sm_100_{name}_warp_specialized", "mbarrier wait for another stage"): 1
        for name in ("dgrad_act", "wgrad", "wgrad_gathered")
    },
    # Columns outside, as above: with subtiles of 32 columns, whole ones.
    ("sm_100_dgrad_act_warp_specialized", "TMA coordinate"): 2,
    ("sm_100_wgrad_warp_specialized", "TMA coordinate"): 2,
    ("sm_100_wgrad_gathered_warp_specialized", "TMA coordinate"): 2,
    ("sm_100_wgrad_gathered_warp_specialized", "TMA gathered row"): 2,
    # The first MMA of a tile, whose accumulator holds zeros before it as well.
    **{(f"sm_100_{name}", BEGUN_ANEW): 1 for name in ("matmul", "gemm", "fc1_gathered", "wgrad")},
}
# Their stores take turns between two buffers, and each waits for both.
TWO_BUFFERS = {
    (subject, "bulk store wait one short") for subject in ("sm_90_dgrad", "sm_90_fc1_gathered", "sm_100_fc1_gathered")
}
# Every place of these is tried: the first, the middle and the last one are needless.
EVERY_PLACE = {("sm_90_fc1_act_fp8_block_warp_specialized", "bar.sync removed")}
CP_ASYNC = "cp.async wait one short"
# Only for warp-specialized kernels: where the same warps read accumulators and multiply, a use of the registers that
# were read orders as much as a wait.
OF_PARTITIONS = {"mbarrier arrival removed", "tcgen05 wait for loads removed"}


def kinds_of(subject):
    if subject.startswith("sm_80") or "staged" in subject:
        return ["bar.sync removed", CP_ASYNC]
    of_others = "tcgen05" if subject.startswith("sm_90") else "wgmma"
    warp_specialized = subject.endswith("warp_specialized")
    return [
        kind
        for kind in KINDS
        if of_others not in kind
        and (kind != CP_ASYNC or ("gathered" in subject and not warp_specialized))
        and (kind != "TMA gathered row" or (subject.startswith("sm_100") and "gathered_warp_specialized" in subject))
        and (kind not in OF_PARTITIONS or warp_specialized)
        and ("tcgen05 copy" not in kind or "mxfp8" in subject)
        and (kind not in OF_COPIES or (subject.startswith("sm_90") and "gathered" in subject and warp_specialized))
        and (kind != "tcgen05 wait for stores removed" or not warp_specialized)  # nothing is stored there
    ]


CELLS = [
    pytest.param(
        subject,
        kind,
        id=f"{subject}-{kind}",
        marks=[] if subject.endswith("matmul") and kind != "TMA coordinate" else [pytest.mark.exhaustive],
    )
    for subject in SUBJECTS
    for kind in kinds_of(subject)
    if (subject, kind) not in TWO_BUFFERS
]


def some(places):
    """At most `MOST` places; in a quick run the first one."""
    if is_quick() or len(places) <= MOST:
        return places[: 1 if is_quick() else MOST]
    return [places[i * (len(places) - 1) // (MOST - 1)] for i in range(MOST)]


@pytest.mark.parametrize(("subject", "kind"), CELLS)
def test_a_weaker_instruction_is_noticed(subject, kind):
    places = SUBJECTS[subject].places(kind)
    assert places
    tried = places if (subject, kind) in EVERY_PLACE and not is_quick() else some(places)
    missed = [line + 1 for line in tried if not SUBJECTS[subject].notices(kind, line)]
    assert len(missed) <= NEEDLESS.get((subject, kind), 0), f"not noticed in PTX lines {missed}"


# The tensor maps of a GEMM are those of x, w and y in this order; Triton gives all of them the widest swizzle.
MAPS = {
    "swizzle of 64 bytes": {"swizzle": lambda _: 2},
    "no swizzle": {"swizzle": lambda _: 0},
    "box of one row less": {"box": lambda box: [*box[:1], box[1] - 1, *box[2:]]},
    "half as wide a box": {"box": lambda box: [box[0] // 2, *box[1:]]},
    "stride of 16 bytes more": {"strides": lambda strides: [strides[0] + 16, *strides[1:]]},
    "address of 16 bytes more": {"address": lambda address: address + 16},
}


@pytest.mark.parametrize("tensor", ["x", "w", "y"])
@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=[pytest.mark.exhaustive] * (i > 0)) for i, c in enumerate(MAPS)]
)
def test_another_tensor_map_is_noticed(change, tensor):
    with described("xwy".index(tensor), **MAPS[change]):
        assert noticed(SUBJECTS["sm_90_gemm"].run)


def test_a_right_run_is_not():
    """Nor is a second one, which finds everything compiled."""
    for _ in range(2):
        assert not noticed(SUBJECTS["sm_90_gemm"].run)


def test_subjects_are_what_their_names_say():
    for target in ("sm_80", "sm_90", "sm_100"):
        ptx = SUBJECTS[f"{target}_matmul"].right().ptx
        assert re.search(rf"\.target {target}a?\b", ptx)
        assert ("cp.async.bulk.tensor" in ptx) == (target != "sm_80")
        assert ("wgmma" in ptx, "tcgen05" in ptx) == (target == "sm_90", target == "sm_100")
    assert LATE.races
