"""Warp-specialized kernels: many orders of the warps, and limits of their rings and buffers.

Their results are checked in the cases of test_kernels.py, mistakes in their compiled code in test_mutations.py.
"""

import re

import pytest
import torch
from cases import cases, dgrad_act, experts, factory, gemm, wgrad
from cases.experts import DEVICE
from cases.factory import wgrad_segment
from emulation.layers import emulated
from ptx_emulator.library import Order

from fusedmlp import Activation
from fusedmlp.kernels.dgrad_act.launch import grouped_dgrad_act_
from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles import table
from fusedmlp.operators.triton_impl import act_options

pytestmark = pytest.mark.usefixtures("poison")

SEEDS = range(1, 13)
RANDOM = [
    Order("random", seed=seed, random_schedule=True, resident=1 + seed % 3, races=True, global_races=True)
    for seed in SEEDS
]
NAMES = (
    *("gemm deep", "gemm few", "gemm one"),
    *("fc1_act deep", "fc1_act few", "fc1_act gpt_oss"),
    *("dgrad_act deep", "dgrad_act few", "dgrad_act gpt_oss", "dgrad_act many"),
    *("fc1_act deep gathered gpt_oss", "dgrad_act deep gathered gpt_oss"),
    *("wgrad tall gathered x", "wgrad tall gathered dy bias", "wgrad many gathered x overwrite"),
    *("wgrad deep", "wgrad tall", "wgrad many overwrite bias", "wgrad deep segments overwrite", "wgrad scattered"),
)
IN_8_BITS = (
    *("gemm deep", "gemm few", "fc1_act deep", "fc1_act few", "fc1_act gpt_oss", "fc1_act gelu"),
    *("wgrad deep", "wgrad many", "wgrad segments overwrite"),
)
QUICK = "gemm few"
TARGETS = ("sm_90", "sm_100")
CASES = {case.name: case for case in cases.cases() if case.id.startswith("long-bf16")}


@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(target, name, marks=[] if name == QUICK else pytest.mark.exhaustive)
        for target in TARGETS
        for name in NAMES
    ],
)
def test_the_same_bits_in_many_orders(target, name):
    with emulated(target, "long", warp_specialized=True, orders=RANDOM) as launched:
        CASES[name].run()
    assert any("warp_specialized" in launch.kernel for launch in launched)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", IN_8_BITS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_same_bits_in_many_orders_in_8_bits(target, name):
    (case,) = (case for case in cases.of_recipes(target) if case.name == name)
    with emulated(target, orders=RANDOM) as launched:
        case.run()
    assert any(case.precision in launch.kernel for launch in launched)


# Rows of experts, with 32 rows a step and six or eight stages (sm_90), or with 64 and three (sm_90) or four: no step,
# one, as many as stages, one more.
STEPS = ((1, 64, 65, 192, 193, 0, 256, 257), 5)


@pytest.mark.sparse
@pytest.mark.parametrize(("target", "large"), [("sm_90", False), ("sm_90", True), ("sm_100", False)])
@pytest.mark.parametrize("accumulate", [True, False])
def test_steps_of_wgrad_around_the_number_of_stages(accumulate, target, large):
    counts, padding = STEPS
    one = wgrad_segment(counts, 136, 264, torch.bfloat16, padding, seed=0, device=DEVICE)
    _, dw = wgrad.main_grad("packed", len(counts), 136, 264)
    if not accumulate:
        for expert in dw:
            expert.fill_(float("nan"))
    with emulated(target, "long", warp_specialized=True, large=large):
        assert wgrad.run(dw, [one], accumulate, packed=True) == "warp_specialized"
    wgrad.check(dw, [one], wgrad.UNTOUCHED if accumulate else 0.0)


@pytest.mark.sparse
@pytest.mark.parametrize("where", ["packed", "reversed", "packed in_out"])
@pytest.mark.parametrize("gathered", ["", "dy", "x"])
def test_main_grad_that_is_loaded_ahead(gathered, where):
    """Into subtiles of its own, also at the end of rows and columns, and for tiles of several experts in turn."""
    one = wgrad_segment((70, 0, 33, 1, 200), 208, 336, torch.bfloat16, 3, seed=0, device=DEVICE)
    with emulated("sm_90", "long", warp_specialized=True), recording() as log:
        wgrad.check_random_main_grad(one, where, gathered)
    assert log[-1].chosen.tile.SLOTS


@pytest.mark.sparse
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("K", [8, 64, 192, 264, 328])
def test_steps_of_a_gemm_around_the_number_of_stages(K, target):
    case = factory.Case(counts=(130, 0, 1), padding=3, H=K, F=132, dtype=torch.bfloat16)
    with emulated(target, "long", warp_specialized=True):
        gemm.check(case, bias=False)


@pytest.mark.parametrize("rows", [100, 300, 600])
def test_tiles_around_the_number_of_accumulators_in_tensor_memory(rows):
    """Two, four and six tiles of rows by three of columns on three multiprocessors, each with two accumulators."""
    case = factory.Case(counts=(rows, 0, 1), padding=3, H=72, F=264, dtype=torch.bfloat16)
    with emulated("sm_100", "long", warp_specialized=True):
        gemm.check(case)


OPCODES = re.compile(r"mbarrier\.(?:try_wait|arrive\.shared)|tcgen05\.(?:ld|mma|commit|fence::\w+)")


FENCED = (
    *("gemm few", "fc1_act few", "dgrad_act few", "wgrad few", "wgrad scattered"),
    *("fc1_act gathered", "wgrad many gathered x overwrite"),
)


@pytest.mark.parametrize("name", FENCED)
def test_fences_between_reads_and_products_of_different_threads(name):
    """PTX requires them, but they order nothing in the emulator: the test finds them in the text."""
    with emulated("sm_100", "long", warp_specialized=True) as launched:
        CASES[name].run()
    (ptx,) = (launch.ptx for launch in launched if "warp_specialized" in launch.kernel)
    text = " ".join(found.rpartition(".")[2].rpartition(":")[2] for found in OPCODES.findall(ptx))
    fenced_reads = r"try_wait after_thread_sync ld (?:.*? )?ld before_thread_sync shared"
    assert re.search(fenced_reads, text)
    assert re.search(r"try_wait after_thread_sync (?:commit )?try_wait (?:mma )+commit", text)
    assert text.count("after_thread_sync") == 2


@pytest.mark.parametrize("target", TARGETS)
def test_probabilities_that_are_not_finite_leave_their_gradients_alone(target):
    """The gradient of a probability does not depend on it, and is recomputed where it overflowed."""
    inputs = dgrad_act.Inputs(factory.Case(counts=(70, 3), H=72, F=264, dtype=torch.bfloat16))
    inputs.probs[:2] = torch.tensor([float("inf"), float("nan")])
    with emulated(target, "long", warp_specialized=True):
        results, launch = dgrad_act.run(inputs)
    assert launch.path == "warp_specialized"
    assert results["dprobs"].isfinite().all()


@pytest.mark.parametrize("kind", ["int64", "no multiple of 16 bytes"])
@pytest.mark.parametrize("name", ["fc1_act gathered", "dgrad_act gathered", "wgrad gathered x"])
@pytest.mark.parametrize("target", TARGETS)
def test_indices_of_other_types_and_addresses(target, name, kind, monkeypatch):
    """Each of them compiles a kernel of its own."""
    among_others, made = experts.among_others, []

    def other(rows, owned, index_dtype=torch.int32, seed=1):
        tokens, index = among_others(rows, owned, torch.int64 if kind == "int64" else index_dtype, seed)
        made.append(index if kind == "int64" else torch.cat([index[:1], index])[1:])
        return tokens, made[-1]

    monkeypatch.setattr(experts, "among_others", other)
    with emulated(target, "long", warp_specialized=True) as launched:
        CASES[name].run()
    assert all(index.dtype == torch.int64 or index.data_ptr() % 16 for index in made)
    assert any("warp_specialized" in launch.kernel for launch in launched)


def test_several_segments_of_gathered_rows_go_as_before():
    """Each segment would need a descriptor of its own, and kernels have one."""
    with emulated("sm_100", "long", warp_specialized=True) as launched:
        CASES["wgrad gathered segments"].run()
    assert not any("warp_specialized" in launch.kernel for launch in launched)


@pytest.mark.parametrize(
    ("target", "stride", "path"),
    [
        ("sm_100", 80, "warp_specialized"),
        ("sm_100", 0, "gather"),  # no descriptor has a distance of 0 between rows
        ("sm_90", 0, "warp_specialized"),
    ],
)
def test_gathered_rows_of_one_token_that_stands_for_all(target, stride, path):
    tokens = torch.ones(90, 80, dtype=torch.bfloat16).as_strided((90, 80), (stride, 1))
    row_ids, schedule = torch.arange(73, dtype=torch.int32), experts.tiles_of((70, 3), 73, DEVICE)
    h, a, act = (
        torch.zeros(73, 288).bfloat16(),
        torch.zeros(73, 144).bfloat16(),
        act_options(Activation("swiglu").encoded),
    )
    fc1, fc2 = torch.ones(2, 288, 80).bfloat16(), torch.ones(2, 80, 144).bfloat16()
    with emulated(target, "long", warp_specialized=True), recording() as log:
        grouped_fc1_act_(h, a, tokens, experts.place(fc1, "packed", DEVICE), schedule, act, row_ids_R=row_ids)
        grouped_dgrad_act_(
            torch.empty_like(h), a, tokens, h, experts.place(fc2, "packed", DEVICE), schedule, act, row_ids_R=row_ids
        )
    assert [launch.path for launch in log] == [path, path]
    assert (h == 80).all()


@pytest.mark.parametrize(
    ("kernel", "changes", "check"),
    [
        ("gemm", {"num_stages": 1}, "gemm few"),
        ("wgrad", {"num_stages": 1}, "wgrad few"),
        ("wgrad", {"SUBTILES": 1, "num_stages": 2}, "wgrad overwrite of bf16"),
    ],
)
def test_tiles_that_would_wait_for_ever_or_overwrite_what_is_read_do_not_compile(kernel, changes, check):
    own = table.TABLES["sm_90"]
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in own if key[:2] == (kernel, "warp_specialized")]:
            patch.setitem(own, key, own[key]._replace(SLOTS=0, **changes))
        with emulated("sm_90", "long", warp_specialized=True), pytest.raises(Exception) as error:  # noqa: PT011
            CASES[check].run()
    # Triton raises an error for each function on the way; the innermost ends with the assertion.
    innermost = error.value
    while innermost.__cause__ or innermost.__context__:
        innermost = innermost.__cause__ or innermost.__context__
    assert re.search(r"static_assert\((STAGES > 1|TILE\.SUBTILES %)", str(innermost))
