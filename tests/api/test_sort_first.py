"""Backward from tokens: where rows are sorted by a copy, for kernels that would otherwise gather them."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import lifetimes, moe, tiles
from cases.moe import Case, Inputs

from bench.limits.shapes import SHAPES
from bench.oracle.tolerance import assert_close
from fusedmlp.activation import Activation
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles import table
from fusedmlp.operators import triton_impl
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments
from fusedmlp.targets import TARGETS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_NAME = {shape.name: shape for shape in SHAPES}
EXPERTS = 3
GATHERS = ["dgrad_act", "gemm", "wgrad", "wgrad", "combine"]
SORTS = ["spread", "dgrad_act", "wgrad", "spread", "wgrad", "gemm", "combine"]


def ruled(rule):
    """Sort first by this rule, on every target; None: nowhere."""
    every = {} if rule is None else dict.fromkeys(table.SORT_FIRST, table.SortFirst(*rule))
    return mock.patch.dict(table.SORT_FIRST, every, clear=True)


def ran(case, rule):
    """Results of a case, and the kernels that ran, forward and backward."""
    with tiles.changed(replace), ruled(rule), recording() as launched:  # a new target, so programs are planned anew
        results = moe.run(Inputs(case), "triton", DEVICE)
    return results, [launch.name.removeprefix("grouped_") for launch in launched]


CASES = [
    Case(T=13, K=3, H=16, F=16, bias=True, mode="grad"),
    Case(T=13, K=3, H=16, F=16, ids="outside"),
    Case(T=13, K=4, H=16, F=16, ids="one choice", bias=True, packed=False, layout="in_out"),
    Case(T=9, K=1, H=24, F=8, dtype=torch.bfloat16, mode="overwrite", activation="relu2"),
    Case(T=0, K=2, H=16, F=16),
    Case(T=7, K=9, H=48, F=16, dtype=torch.float16, microbatches=2),
]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.ids}-{case.T}-{case.K}")
def test_sorted_rows_give_the_results_of_gathered_ones(case):
    inputs = Inputs(case)
    expected, low_precision = moe.reference(inputs, torch.float64), moe.reference(inputs, case.dtype)
    gathered, kernels = ran(case, None)
    assert "spread" not in kernels
    found, kernels = ran(case, (1, 0))
    assert kernels.count("spread") == (2 * case.microbatches if case.T else 0)
    assert_close(
        found, expected, low_precision, max(case.dtype, case.main_grad_dtype, key=lambda d: torch.finfo(d).eps)
    )
    assert all(torch.equal(found[name], gathered[name]) for name in found)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("queue", ["delayed", "fused"])
def test_delayed_gradients_gather_from_tokens(queue):
    """Only dgrad_act reads rows in this backward."""
    case = Case(T=13, K=3, H=16, F=16, queue=queue, microbatches=2)
    gathered, _ = ran(case, None)
    found, kernels = ran(case, (1, 0))
    assert kernels.count("spread") == 2
    assert all(torch.equal(found[name], gathered[name]) for name in found)


def planned(layer, target="sm_90", dtype=torch.bfloat16, rows=None, **options):
    """Program of the backward of a layer that gathers rows from tokens, with few experts."""
    shape = BY_NAME[layer]
    H, F, K, adds = shape.H, shape.F, shape.R // shape.most, options.pop("adds", True)
    R = (rows or shape.R // shape.E) * EXPERTS // K * K
    x, dy = torch.empty(2, R // K, H, dtype=dtype)
    fc1, fc2 = torch.empty(EXPERTS, 2 * F, H, dtype=dtype), torch.empty(EXPERTS, H, F, dtype=dtype)
    ids, probs = torch.empty(R, dtype=torch.int32), torch.empty(R)
    forward = MLPArguments(
        *(x, None, [fc1], [fc2], [], [], torch.empty(EXPERTS + 1, dtype=torch.int32), ids, ids, probs),
        activation=Activation("swiglu").encoded,
        recipe="",
        batch_invariant=options.pop("batch_invariant", False),
        lora1=options.pop("lora1", []),
    )
    rest = {"dw1": [torch.empty(fc1.shape)], "dw2": [torch.empty(fc2.shape)], "dy": dy}
    rest |= {"h": torch.empty(R, 2 * F, dtype=dtype), "accumulate1": adds, "accumulate2": adds, "need_dx": True}
    rest |= {name: [] for name in ("db1", "db2", "dlora1", "dlora2")} | {"keep": False} | options
    given = MLPBackwardArguments.of(forward, **rest)
    target = TARGETS[target].planned_for(warp_specialized=None)
    return triton_impl.grouped_mlp_backward_.program(target, *given.without_impl)


def names(program):
    names = (launch.name.removeprefix("grouped_").removesuffix("_warp_specialized") for launch in program.launches)
    return [name for name in names if name != "plan"]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("sonic-c", SORTS),
        ("sonic-d", SORTS),
        ("qwen3-30b-8k", SORTS),
        ("qwen3-30b-32k", SORTS),
        ("mixtral", SORTS),
        ("gpt-oss-20b", SORTS),
        ("sonic-a", GATHERS),  # narrow: a copy takes longer than it saves
        ("sonic-b", GATHERS),
        ("qwen3.5", GATHERS),  # 160 rows an expert: main_grad is the limit
    ],
)
def test_layers_that_were_timed(layer, expected):
    assert names(planned(layer)) == expected


LORA = [torch.empty(EXPERTS, 16, 4096, dtype=torch.bfloat16), torch.empty(EXPERTS, 2048, 16, dtype=torch.bfloat16)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rows": 40}, GATHERS),  # short loads
        ({"dtype": torch.float32}, GATHERS),
        ({"target": "sm_100"}, GATHERS),
        ({"target": "sm_80"}, GATHERS),
        ({"need_dx": False}, ["dgrad_act", "sum_partials", "wgrad", "wgrad"]),
        ({"batch_invariant": True}, GATHERS),
        ({"lora1": LORA}, ["dgrad_act", "gemm", "gemm", "wgrad", "wgrad", "combine"]),
        ({"dw1": [], "dw2": [], "keep": True}, ["dgrad_act", "gemm", "combine"]),  # F / 2 FLOPs a byte
        ({"dw1": []}, ["spread", "dgrad_act", "wgrad", "gemm", "combine"]),
        ({"dw2": []}, ["dgrad_act", "spread", "wgrad", "gemm", "combine"]),
        ({"rows": 256}, GATHERS),
        ({"rows": 256, "adds": False}, SORTS),  # half the traffic of main_grad
    ],
    ids=" ".join,
)
def test_calls_of_one_layer(options, expected):
    assert names(planned("sonic-c", **options)) == expected


def test_sorted_rows_take_no_memory():
    """They lie where dx does, and the sums of tokens are allocated when other tensors have been freed."""
    found = planned("sonic-c")
    with ruled(None):
        gathered = planned("sonic-c")
    assert (names(found), names(gathered)) == (SORTS, GATHERS)
    shape = BY_NAME["sonic-c"]
    rows = shape.R // shape.E * EXPERTS
    largest = 2 * rows * (shape.H + 3 * shape.F)  # dx, dh and the activation
    for program in (found, gathered):
        assert largest <= lifetimes.most_bytes(program) < 1.01 * largest
    (dx,) = {launch.arguments["out_ptr"].source for launch in found.launches if launch.name == "spread"}
    assert found.launches[-2].arguments["y_desc"].array.source == dx
