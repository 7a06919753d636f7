"""When kernels with a task for each warp are launched, and what happens where they cannot be."""

import json

import pytest
import torch
from support import forked

from fusedmlp.kernels.tiles import configs
from fusedmlp.kernels.tiles.configs import Key

CPU = torch.device("cpu")
KERNELS = ("fc1_act", "gemm", "dgrad_act", "wgrad")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(configs, "architecture", lambda _device: "sm_90")
    monkeypatch.setattr(configs, "TUNED", {})


def switched(monkeypatch, on):
    monkeypatch.setattr(configs, "SPECIALISED", on)


def chosen(kernel, dtype=torch.bfloat16, rows=64, **options):
    return configs.choose(kernel, dtype, CPU, True, lambda: True, rows, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_switch(monkeypatch, architecture, kernel):
    monkeypatch.setattr(configs, "architecture", lambda _device: architecture)
    tile = configs.TABLES[architecture][kernel, "specialised", 16]["long"]
    switched(monkeypatch, False)
    assert chosen(kernel)[0] == "tma"
    switched(monkeypatch, True)
    assert chosen(kernel) == ("specialised", tile)
    assert chosen(kernel, torch.float16) == ("specialised", tile)


def test_what_they_do_not_take_goes_as_before(monkeypatch):
    switched(monkeypatch, True)
    assert chosen("gemm", rows=63)[0] == "tma"
    assert chosen("gemm", torch.float32)[0] == "pointer"
    assert chosen("fc1_act", by_tasks=False)[0] == "tma"
    assert configs.choose("gemm", torch.bfloat16, CPU, False, lambda: True, 64)[0] == "pointer"
    for architecture in ("sm_80", "sm_120", "gfx942"):
        monkeypatch.setattr(configs, "architecture", lambda _device, name=architecture: name)
        assert chosen("gemm")[0] == "pointer"


def test_rows_that_are_gathered_have_tasks_on_blackwell_alone(monkeypatch):
    """Where TMA follows an index."""
    switched(monkeypatch, True)
    assert chosen("fc1_act", gathered=True)[0] == "gather"
    monkeypatch.setattr(configs, "architecture", lambda _device: "sm_100")
    assert chosen("fc1_act", gathered=True)[0] == "specialised"
    assert chosen("fc1_act", gathered=True, by_tasks=False)[0] == "gather"
    assert chosen("fc1_act", rows=63, gathered=True)[0] == "gather"


@pytest.mark.parametrize(("architecture", "rows"), [("sm_90", 64), ("sm_100", 128), ("sm_103", 128)])
def test_rows_of_a_task(monkeypatch, architecture, rows):
    """Of 128: `wgmma` of a warpgroup has 64, `tcgen05.mma` of one CTA all of them."""
    monkeypatch.setattr(configs, "architecture", lambda _device: architecture)
    tile = configs.TABLES["sm_100"]["gemm", "specialised", 16]["long"]
    assert configs.task_rows("specialised", tile, CPU) == rows
    assert configs.task_rows("tma", tile, CPU) == 128


def test_what_was_tuned_needs_no_switch(monkeypatch):
    switched(monkeypatch, False)
    tile = configs.Tile(128, 256, 64, 4, 2)
    configs.TUNED[Key("gemm", "specialised", 16, "long")] = tile
    assert chosen("gemm") == ("specialised", tile)
    assert chosen("wgrad")[0] == "tma"


def test_what_was_tuned_is_of_rows_in_order(monkeypatch):
    """Nobody compared it, or checked its numbers, with rows that are gathered."""
    monkeypatch.setattr(configs, "architecture", lambda _device: "sm_100")
    configs.TUNED[Key("fc1_act", "specialised", 16, "long")] = tile = configs.Tile(128, 128, 64, 8, 3)
    switched(monkeypatch, False)
    assert chosen("fc1_act") == ("specialised", tile)
    assert chosen("fc1_act", gathered=True)[0] == "gather"
    switched(monkeypatch, True)
    shipped = configs.TABLES["sm_100"]["fc1_act", "specialised", 16]["long"]
    assert chosen("fc1_act", gathered=True) == ("specialised", shipped)


def test_without_gluon_the_others_are_launched(monkeypatch):
    switched(monkeypatch, True)
    assert configs.gluon_missing() == ""
    monkeypatch.setattr(configs, "gluon_missing", lambda: "Triton 3.5 has no Gluon that fits: no module")
    assert chosen("gemm")[0] == "tma"
    configs.TUNED[Key("gemm", "specialised", 16, "long")] = configs.Tile(128, 256, 64, 4, 2)
    assert chosen("gemm")[0] == "tma"


_MISSING = """
import sys
from triton.experimental.gluon.language.nvidia import blackwell, hopper
if sys.argv[1] == "all":
    sys.modules["triton.experimental.gluon"] = None
elif sys.argv[1] != "nothing":
    delattr(blackwell if "tcgen05" in sys.argv[1] else hopper, sys.argv[1])
from fusedmlp.kernels.tiles import configs
print(configs.gluon_missing())
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
from fusedmlp.kernels.tiles import configs
if sys.argv[1] == "without":
    configs.gluon_missing = lambda: "not there"
from bench.proof import cases
from fusedmlp.doctor import recorder, targets
names = []
def note(launch):
    names.append([launch.kernel, launch.path])
    return False
import fusedmlp.operators.triton_impl
with recorder.recording(targets.TARGETS[sys.argv[3]], "long", specialised=configs.SPECIALISED, wanted=note):
    (cases.DEMANDING | cases.CORE)[sys.argv[2]](torch.bfloat16)
print(json.dumps(names))
"""


@pytest.mark.parametrize(
    ("target", "gluon", "switch", "case", "expected"),
    [
        ("sm_90", "with", "1", "main_grad", ["fc1_act", "gemm", "dgrad_act", "gemm", "wgrad", "wgrad"]),
        ("sm_90", "with", "0", "main_grad", []),
        ("sm_90", "without", "1", "main_grad", []),
        ("sm_90", "with", "1", "several micro-batches", ["wgrad"]),
        # Sums of biases by the other kernel; weights apart have no descriptor, but operands of wgrad have.
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
    done = forked.run("-c", _LAUNCHED, gluon, case, target, FUSEDMLP_SPECIALISED=switch)
    assert done.returncode == 0, done.stderr
    by_tasks = [
        name for name, path in json.loads(done.stdout) if "specialised" in (name, path) or "specialised" in name
    ]
    assert by_tasks == [f"grouped_{name}_specialised" for name in expected]


def test_doctor_says_why_not(monkeypatch):
    from fusedmlp.doctor import command, facts

    monkeypatch.setattr(configs, "gluon_missing", lambda: "Triton 3.5 has no Gluon that fits: no module")
    lines = command._machine_lines(facts.machine())
    assert "Kernels with a task for each warp: no: Triton 3.5 has no Gluon that fits: no module" in lines
    monkeypatch.setattr(configs, "gluon_missing", lambda: "")
    monkeypatch.setenv("FUSEDMLP_SPECIALISED", "1")
    assert facts.machine().specialised == "yes, on Hopper and sm_100"
    monkeypatch.setenv("FUSEDMLP_SPECIALISED", "0")
    assert facts.machine().specialised.startswith("only where tuned")
