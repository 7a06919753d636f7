"""When warp-specialized kernels are launched, and what happens where they cannot be."""

import json

import pytest
import torch
from support import forked

from bench.proof import cases
from fusedmlp.activation import Activation
from fusedmlp.doctor.targets import TARGETS
from fusedmlp.kernels import warp_specialized
from fusedmlp.kernels.tiles import select, table
from fusedmlp.kernels.tiles.table import Key
from fusedmlp.operators import triton_impl


def target(architecture="sm_90", switch=True, tuned=()):
    return select.Target(architecture, 100, table.TABLES[architecture], select.Settings(switch, dict(tuned)))


def chosen(kernel, on=None, dtype=torch.bfloat16, rows=64, fits=True, **options):
    """Chosen path and tile."""
    found = select.choose(kernel, dtype, on or target(), fits, True, rows, **options)
    return found.path, found.tile


@pytest.mark.parametrize("kernel", table.PASSES)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_switch(architecture, kernel):
    tile = table.TABLES[architecture][kernel, "warp_specialized", "bf16", "long"]
    assert chosen(kernel, target(architecture, switch=False))[0] == "tma"
    assert chosen(kernel, target(architecture)) == ("warp_specialized", tile)
    assert chosen(kernel, target(architecture), torch.float16) == ("warp_specialized", tile)


def test_what_they_do_not_take_goes_as_before():
    assert chosen("gemm", rows=63)[0] == "tma"
    assert chosen("gemm", dtype=torch.float32)[0] == "pointer"
    assert chosen("fc1_act", warp_specialized=False)[0] == "tma"
    assert chosen("gemm", fits=False)[0] == "pointer"
    for architecture in ("sm_80", "sm_120", "gfx942"):
        assert chosen("gemm", target(architecture))[0] == "pointer"


def test_gathered_rows_take_warp_specialized_kernels_on_blackwell_alone():
    """TMA gathers by row ids there."""
    assert chosen("fc1_act", gathered=True)[0] == "gather"
    blackwell = target("sm_100")
    assert chosen("fc1_act", blackwell, gathered=True)[0] == "warp_specialized"
    assert chosen("fc1_act", blackwell, gathered=True, warp_specialized=False)[0] == "gather"
    assert chosen("fc1_act", blackwell, rows=63, gathered=True)[0] == "gather"


@pytest.mark.parametrize(("architecture", "rows"), [("sm_90", 64), ("sm_100", 128)])
def test_rows_of_a_consumer(architecture, rows):
    """Rows of a consumer, for tiles of 128: `wgmma` of a warpgroup takes 64, `tcgen05.mma` of one CTA all."""
    tile = table.TABLES["sm_100"]["gemm", "warp_specialized", "bf16", "long"]
    assert target(architecture).consumer_rows("warp_specialized", tile) == rows
    assert target(architecture).consumer_rows("tma", tile) == 128


def test_what_was_tuned_needs_no_switch():
    tile = table.Tile(128, 256, 64, 4, 2)
    tuned = target(switch=False, tuned={Key("gemm", "warp_specialized", "bf16", "long"): tile})
    assert chosen("gemm", tuned) == ("warp_specialized", tile)
    assert chosen("wgrad", tuned)[0] == "tma"


def test_what_was_tuned_is_of_rows_in_order():
    """A tuned tile was neither timed nor checked with gathered rows."""
    tuned = {Key("fc1_act", "warp_specialized", "bf16", "long"): table.Tile(128, 128, 64, 8, 3)}
    (tile,) = tuned.values()
    without = target("sm_100", switch=False, tuned=tuned)
    assert chosen("fc1_act", without) == ("warp_specialized", tile)
    assert chosen("fc1_act", without, gathered=True)[0] == "gather"
    shipped = table.TABLES["sm_100"]["fc1_act", "warp_specialized", "bf16", "long"]
    assert chosen("fc1_act", target("sm_100", tuned=tuned), gathered=True) == ("warp_specialized", shipped)


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
    own = table.TABLES[architecture]["dgrad_act", "warp_specialized", "bf16", "long"]
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
from fusedmlp.doctor.targets import TARGETS
from fusedmlp.operators.triton_impl import SETTINGS
planned_for = TARGETS[sys.argv[3]].planned_for("long", warp_specialized=SETTINGS.warp_specialized)
calls = (cases.DEMANDING | cases.CORE)[sys.argv[2]](torch.bfloat16)
print(json.dumps([[launch.name, launch.path] for launch in cases.launches(calls, planned_for)]))
"""


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
        ("sm_90", "with", "1", "gathered", ["gemm", "gemm"]),
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
    from fusedmlp.doctor import command, facts

    monkeypatch.setattr(warp_specialized, "gluon_missing", lambda: "Triton 3.5 has no Gluon that fits: no module")
    lines = command._machine_lines(facts.machine())
    assert "Warp-specialized kernels: no: Triton 3.5 has no Gluon that fits: no module" in lines
    monkeypatch.setattr(warp_specialized, "gluon_missing", lambda: "")
    monkeypatch.setenv("FUSEDMLP_WARP_SPECIALIZED", "1")
    assert facts.machine().warp_specialized == "yes, on Hopper and sm_100"
    monkeypatch.setenv("FUSEDMLP_WARP_SPECIALIZED", "0")
    assert facts.machine().warp_specialized.startswith("only where tuned")
