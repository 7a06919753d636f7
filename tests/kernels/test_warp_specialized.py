"""When warp-specialized kernels are launched, and what happens where they cannot be."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import forked

from bench.limits.shapes import SHAPES
from bench.proof import cases
from fusedmlp.activation import Activation
from fusedmlp.kernels import warp_specialized
from fusedmlp.kernels.tiles import select, table
from fusedmlp.kernels.tiles.table import Key
from fusedmlp.operators import triton_impl
from fusedmlp.targets import TARGETS


def target(architecture="sm_90", switch=True):
    return select.Target(architecture, 100, table.TABLES[architecture], switch)


def tile_of(architecture, kernel, gathered=False):
    """The shipped tile, for wgrad on Hopper that of large experts."""
    regime = "mma_add" if (architecture, kernel) == ("sm_90", "wgrad") else "any"
    return table.TABLES[architecture][Key(kernel, "warp_specialized", "bf16", "long", gathered, regime)]


def chosen(kernel, on=None, dtype=torch.bfloat16, rows=64, fits=True, **options):
    """Chosen path and tile."""
    on, regime = on or target(), "mma_add" if kernel == "wgrad" else "any"
    found = select.choose(kernel, dtype, on, fits, True, rows, **{"regime": regime} | options)
    return found.path, found.tile


@pytest.mark.parametrize("kernel", table.PASSES)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_switch(architecture, kernel):
    tile = tile_of(architecture, kernel)
    assert chosen(kernel, target(architecture, switch=False))[0] == "tma"
    by_default = chosen(kernel, target(architecture, switch=None))
    assert by_default[0] == ("warp_specialized" if architecture == "sm_90" else "tma")
    assert chosen(kernel, target(architecture)) == ("warp_specialized", tile)
    assert chosen(kernel, target(architecture), torch.float16) == ("warp_specialized", tile)


def test_what_they_do_not_take_goes_as_before():
    assert chosen("gemm", rows=63)[0] == "tma"
    assert chosen("gemm", dtype=torch.float32)[0] == "pointer"
    assert chosen("fc1_act", refused="for a reason")[0] == "tma"
    assert chosen("gemm", fits=False)[0] == "pointer"
    for architecture in ("sm_80", "sm_120", "gfx942"):
        assert chosen("gemm", target(architecture))[0] == "pointer"


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_gathered_rows(architecture):
    on = target(architecture)
    assert chosen("fc1_act", on, gathered=True) == ("warp_specialized", tile_of(architecture, "fc1_act", True))
    assert chosen("fc1_act", on, gathered=True, refused="for a reason")[0] == "gather"
    assert chosen("fc1_act", on, rows=63, gathered=True)[0] == "gather"


REFUSALS = [
    ("sm_90", {}, ""),
    ("sm_90", {"described": False}, "no descriptor fits an operand"),
    ("sm_90", {"gathered": True, "segments": 3}, ""),  # threads copy the rows
    ("sm_90", {"gathered": True, "described": False}, "no descriptor fits an operand"),
    ("sm_90", {"gathered": True, "vectors": False}, "gathered rows do not start, or are not, multiples of 16 elements"),
    ("sm_90", {"gathered": 2}, "threads copy the rows of one operand"),
    ("sm_100", {"gathered": 2}, ""),
    ("sm_100", {"gathered": True}, ""),
    ("sm_100", {"gathered": True, "described": False}, "no descriptor fits an operand"),
    ("sm_100", {"gathered": True, "segments": 2}, "TMA gathers rows of one micro-batch"),
]


@pytest.mark.parametrize(("architecture", "facts", "said"), REFUSALS)
def test_why_a_kernel_cannot_do_a_launch(architecture, facts, said):
    assert warp_specialized.refusal(target(architecture), **{"described": True} | facts) == said


@pytest.mark.parametrize(
    ("card", "rows", "accumulate", "dtype", "regime"),
    [
        # 2 R N K FLOPs beside 8 N K + 2 R (N + K) bytes, N = K = 1,024
        ("H200", 1178, True, torch.float32, "memory_add"),
        ("H200", 1179, True, torch.float32, "mma_add"),
        ("H200", 589, False, torch.float32, "memory_write"),
        ("H200", 590, False, torch.float32, "mma_write"),
        ("H200", 365, True, torch.bfloat16, "mma_add"),  # TMA does not add to 16 bits, so nothing is loaded ahead
        ("H200", 294, False, torch.bfloat16, "memory_write"),
        ("H200", 295, False, torch.bfloat16, "mma_write"),
        ("H100", 2180, True, torch.float32, "memory_add"),
        ("H100", 2181, True, torch.float32, "mma_add"),
    ],
)
def test_the_ring_and_the_epilogue_of_wgrad(card, rows, accumulate, dtype, regime):
    dw, dy = torch.empty(2, 1024, 1024, dtype=dtype), torch.empty(2 * rows, 1024, dtype=torch.bfloat16)
    offsets = torch.tensor([0, rows, 2 * rows], dtype=torch.int32)
    arguments = [dw], [], (dy,), (dy,), (offsets,), (), (), accumulate, ""
    on = replace(target(), flops_a_byte=table.FLOPS_A_BYTE[card])
    launch = triton_impl.wgrad_of_segments_.program(on, *arguments).launches[-1]
    assert launch.chosen.key == Key("wgrad", "warp_specialized", "bf16", "long", False, regime)
    assert len(launch.arguments["dw_desc"].block if launch.arguments["dw_desc"] else ()) == (
        5 if regime == "memory_add" else 0 if accumulate and dtype == torch.bfloat16 else 3
    )


@pytest.mark.parametrize(
    ("rows", "segments", "accumulate", "dtype", "slots"),
    [
        (896, 1, True, torch.float32, 4),
        (1024, 1, True, torch.float32, 0),
        (512, 2, True, torch.float32, 0),  # 1,024 rows an expert
        (256, 2, True, torch.float32, 4),
        (640, 1, False, torch.float32, 0),
        (640, 1, True, torch.bfloat16, 0),
    ],
)
def test_wgrad_in_8_bits_loads_ahead_where_memory_is_the_limit(rows, segments, accumulate, dtype, slots):
    dw, dy = torch.empty(2, 1024, 1024, dtype=dtype), torch.empty(2 * rows, 1024, dtype=torch.bfloat16)
    offsets = torch.tensor([0, rows, 2 * rows], dtype=torch.int32)
    each = [(t,) * segments for t in (dy, dy, offsets)]
    arguments = [dw], [], *each, (), (), accumulate, "fp8_block/fp8_block"
    launch = triton_impl.wgrad_of_segments_.program(target(), *arguments).launches[-1]
    assert slots == launch.chosen.tile.SLOTS
    assert len(launch.arguments["dw_desc"].block if launch.arguments["dw_desc"] else ()) == (
        5 if slots else 0 if accumulate and dtype == torch.bfloat16 else 3
    )


@pytest.mark.parametrize(("architecture", "path"), [("sm_90", "gather"), ("sm_100", "warp_specialized")])
def test_two_gathered_operands_of_wgrad(architecture, path):
    """On Hopper every thread would arrive twice a step."""
    dy, row_ids = torch.empty(256, 256, dtype=torch.bfloat16), torch.empty(256, dtype=torch.int32)
    arguments = [torch.empty(2, 256, 256)], [], (dy,), (dy,), (row_ids[:3],), (row_ids,), (row_ids,), True, ""
    launch = triton_impl.wgrad_of_segments_.program(target(architecture), *arguments).launches[-1]
    assert launch.path == path


@pytest.mark.parametrize("gathered", ["dy", "x"])
def test_the_gathered_operand_of_wgrad_is_the_narrow_one_on_hopper(gathered):
    """Threads copy it: half as much a step."""
    dy, row_ids = torch.empty(256, 256, dtype=torch.bfloat16), torch.empty(256, dtype=torch.int32)
    ids = ((row_ids,), ()) if gathered == "dy" else ((), (row_ids,))
    arguments = [torch.empty(2, 256, 256)], [], (dy,), (dy,), (row_ids[:3],), *ids, True, ""
    launch = triton_impl.wgrad_of_segments_.program(target(), *arguments).launches[-1]
    assert launch.path == "warp_specialized"
    assert launch.chosen.tile[:3] == ((64, 128, 256) if gathered == "dy" else (64, 256, 128))


@pytest.mark.parametrize(("architecture", "rows"), [("sm_90", 64), ("sm_100", 128)])
def test_rows_of_a_consumer(architecture, rows):
    """Rows of a consumer, for tiles of 128: `wgmma` of a warpgroup takes 64, `tcgen05.mma` of one CTA all."""
    tile = tile_of("sm_100", "gemm")
    assert target(architecture).consumer_rows("warp_specialized", tile) == rows
    assert target(architecture).consumer_rows("tma", tile) == 128


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tma_does_not_add_to_16_bits(dtype, accumulate, architecture):
    """It would round the tile, and then the sum: a difference that a tolerance does not show."""
    dw, rows = torch.zeros(2, 256, 256, dtype=dtype), torch.zeros(256, 256, dtype=torch.bfloat16)
    arguments = [dw], [], (rows,), (rows,), (torch.tensor([0, 128, 256], dtype=torch.int32),), (), (), accumulate, ""
    launch = triton_impl.wgrad_of_segments_.program(target(architecture), *arguments).launches[-1]
    assert launch.path == "warp_specialized"
    assert (launch.arguments["dw_desc"] is None) == (accumulate and dtype == torch.bfloat16)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_dgrad_has_tiles_of_256_columns_for_every_activation(architecture, name, limit, interleaved):
    """In more subtiles where it would spill: a clamped exact gelu with halves on Hopper."""
    layer = cases.Layer(Activation(name, limit=limit, interleaved=interleaved))
    planned = cases.launches(layer(torch.bfloat16), TARGETS[architecture].planned_for("long", warp_specialized=True))
    (launch,) = (launch for launch in planned if "dgrad_act" in launch.name)
    own = tile_of(architecture, "dgrad_act")
    if architecture == "sm_90":  # H is 256
        own = table.TABLES[architecture][Key("dgrad_act", "warp_specialized", "bf16", "long", regime="small")]
    spills = architecture == "sm_90" and name == "geglu" and limit is not None and not interleaved
    assert launch.path == "warp_specialized"
    assert own.BLOCK_N == 256
    assert launch.chosen.tile == own._replace(SUBTILES=own.SUBTILES * (2 if spills else 1))
    assert launch.arguments["h_desc"].block[-1] == 256 // launch.chosen.tile.SUBTILES * (2 if interleaved else 1)


_MISSING = """
import sys
from triton.experimental.gluon.language.nvidia import blackwell, hopper
if sys.argv[1] == "all":
    sys.modules["triton.experimental.gluon"] = None
elif sys.argv[1] != "nothing":
    delattr(blackwell if "tcgen05" in sys.argv[1] else hopper, sys.argv[1])
from fusedmlp.kernels.warp_specialized import gluon_missing
print(gluon_missing())
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", ""),
        ("all", "has no Gluon that fits: "),
        ("warpgroup_mma_init", "'warpgroup_mma_init'"),
        ("tcgen05_commit", "'tcgen05_commit'"),
    ],
)
def test_what_another_version_of_triton_lacks(what, said):
    done = forked.run("-c", _MISSING, what)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout if said else not done.stdout.strip()


_LAUNCHED = """
import json, sys, torch
from fusedmlp.kernels import warp_specialized
if sys.argv[1] == "without":
    warp_specialized.gluon_missing = lambda: "not there"
from bench.proof import cases
from fusedmlp.targets import TARGETS
from fusedmlp.operators import triton_impl
asked = triton_impl.WARP_SPECIALIZED
operators = [value for value in vars(triton_impl).values() if isinstance(value, triton_impl.Operator)]
assert operators and all(operator._warp_specialized is asked for operator in operators)
planned_for = TARGETS[sys.argv[3]].planned_for("long", warp_specialized=asked)
calls = (cases.DEMANDING | cases.CORE)[sys.argv[2]](torch.bfloat16)
print(json.dumps([[launch.name, launch.path] for launch in cases.launches(calls, planned_for)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "gluon", "switch", "case", "expected"),
    [
        ("sm_90", "with", "1", "main_grad", ["fc1_act", "gemm", "dgrad_act", "gemm", "wgrad", "wgrad"]),
        ("sm_90", "with", "0", "main_grad", []),
        ("sm_90", "without", "1", "main_grad", []),
        ("sm_90", "with", "1", "several micro-batches", ["wgrad"]),
        # Experts apart have no descriptor, but operands of wgrad have; another kernel sums biases.
        ("sm_90", "with", "1", "gpt-oss, biases, experts apart", ["wgrad", "wgrad"]),
        ("sm_90", "with", "1", "odd sizes, biases", []),
        ("sm_90", "with", "1", "gathered", ["fc1_act", "gemm", "dgrad_act", "gemm", "wgrad", "wgrad"]),
        ("sm_90", "with", "1", "gathered micro-batches", ["wgrad"]),
        ("sm_100", "with", "1", "main_grad", ["fc1_act", "gemm", "dgrad_act", "gemm", "wgrad", "wgrad"]),
        ("sm_100", "with", "1", "gathered", ["fc1_act", "gemm", "dgrad_act", "gemm", "wgrad", "wgrad"]),
        ("sm_100", "with", "1", "gathered micro-batches", []),
        ("sm_100", "with", "0", "main_grad", []),
        ("sm_100", "with", "1", "gpt-oss, biases, experts apart", ["wgrad", "wgrad"]),
    ],
)
def test_what_a_layer_launches(target, gluon, switch, case, expected):
    done = forked.run("-c", _LAUNCHED, gluon, case, target, FUSEDMLP_WARP_SPECIALIZED=switch)
    assert done.returncode == 0, done.stderr
    launched = [
        name for name, path in json.loads(done.stdout) if path == "warp_specialized" or "warp_specialized" in name
    ]
    assert launched == [f"grouped_{name}_warp_specialized" for name in expected]


def test_doctor_says_why_not(monkeypatch):
    from fusedmlp.doctor import facts

    monkeypatch.setattr(warp_specialized, "gluon_missing", lambda: "Triton 3.5 has no Gluon that fits: no module")
    assert facts.machine()["warp_specialized"] == "no: Triton 3.5 has no Gluon that fits: no module"
    monkeypatch.setattr(warp_specialized, "gluon_missing", lambda: "")
    monkeypatch.setenv("FUSEDMLP_WARP_SPECIALIZED", "1")
    assert facts.machine()["warp_specialized"] == "yes, on Hopper and sm_100"
    monkeypatch.delenv("FUSEDMLP_WARP_SPECIALIZED")
    assert facts.machine()["warp_specialized"].startswith("yes, on Hopper; ")
    monkeypatch.setenv("FUSEDMLP_WARP_SPECIALIZED", "0")
    assert facts.machine()["warp_specialized"] == "no, in 16 bits: FUSEDMLP_WARP_SPECIALIZED=0"


@pytest.mark.parametrize(
    ("name", "flops_a_byte"),
    [("NVIDIA H100 80GB HBM3", 264), ("NVIDIA H200", 187), ("NVIDIA GH200 480GB", 187), ("NVIDIA B200", 187)],
)
def test_a_card_is_known_by_its_name(name, flops_a_byte, monkeypatch):
    """Another one is planned for as an H200."""
    properties = SimpleNamespace(name=name, multi_processor_count=132)
    monkeypatch.setattr(select, "architecture", lambda _: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(select.triton.knobs.runtime, "interpret", False)
    found = select._target.__wrapped__(torch.device("cuda", 0), None, False)
    assert (found.multiprocessors, found.flops_a_byte) == (132, flops_a_byte)


@pytest.mark.parametrize(
    ("layer", "card", "regimes"),
    [
        # On the H100, whose memory is slower, with main_grad loaded ahead: there the ring for MMAs had lost.
        ("sonic-a", "H100", ["memory_add", "memory_add"]),
        ("sonic-b", "H100", ["memory_add", "memory_add"]),
        ("gpt-oss-20b", "H100", ["memory_add", "memory_add"]),
        ("qwen3-30b-8k", "H100", ["memory_add", "memory_add"]),
        ("sonic-c", "H100", ["mma_add", "mma_add"]),
        ("mixtral", "H100", ["mma_add", "mma_add"]),
        ("sonic-a", "H200", ["mma_add", "memory_add"]),
        ("gpt-oss-20b", "H200", ["mma_add", "mma_add"]),
        ("sonic-c", "H200", ["mma_add", "mma_add"]),
        ("qwen3-30b-8k", "H200", ["memory_add", "memory_add"]),
    ],
)
def test_rings_of_layers_that_were_timed(layer, card, regimes):
    (shape,) = [each for each in SHAPES if each.name == layer]
    on, R = replace(target(), flops_a_byte=table.FLOPS_A_BYTE[card]), 2 * shape.R // shape.E
    found = []
    for N, K in ((2 * shape.F, shape.H), (shape.H, shape.F)):
        dy, x = (torch.empty(R, size, dtype=torch.bfloat16) for size in (N, K))
        offsets = torch.empty(3, dtype=torch.int32)
        arguments = [torch.empty(2, N, K)], [], (dy,), (x,), (offsets,), (), (), True, ""
        found.append(triton_impl.wgrad_of_segments_.program(on, *arguments).launches[-1].chosen.key.regime)
    assert found == regimes
