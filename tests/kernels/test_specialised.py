"""When kernels with a task for each warp are launched, and what happens where they cannot be."""

import json

import pytest
import torch
from support import forked

from fusedmlp.kernels import configs
from fusedmlp.kernels.configs import Key

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
def test_the_switch(monkeypatch, kernel):
    tile = configs.TABLES["sm_90"][kernel, "specialised", 16]["long"]
    switched(monkeypatch, False)
    assert chosen(kernel)[0] == "tma"
    switched(monkeypatch, True)
    assert chosen(kernel) == ("specialised", tile)
    assert chosen(kernel, torch.float16) == ("specialised", tile)


def test_what_they_do_not_take_goes_as_before(monkeypatch):
    switched(monkeypatch, True)
    assert chosen("gemm", rows=63)[0] == "tma"
    assert chosen("gemm", torch.float32)[0] == "pointer"
    assert chosen("fc1_act", gathered=True)[0] == "gather"
    assert chosen("fc1_act", by_tasks=False)[0] == "tma"
    assert configs.choose("gemm", torch.bfloat16, CPU, False, lambda: True, 64)[0] == "pointer"
    for architecture in ("sm_80", "sm_100", "sm_120", "gfx942"):
        monkeypatch.setattr(configs, "architecture", lambda _device, name=architecture: name)
        assert chosen("gemm")[0] in ("tma", "pointer")


def test_what_was_tuned_needs_no_switch(monkeypatch):
    switched(monkeypatch, False)
    tile = configs.Tile(128, 256, 64, 4, 2)
    configs.TUNED[Key("gemm", "specialised", 16, "long")] = tile
    assert chosen("gemm") == ("specialised", tile)
    assert chosen("wgrad")[0] == "tma"


def test_without_gluon_the_others_are_launched(monkeypatch):
    switched(monkeypatch, True)
    assert configs.gluon_missing() == ""
    monkeypatch.setattr(configs, "gluon_missing", lambda: "Triton 3.5 has no Gluon that fits: no module")
    assert chosen("gemm")[0] == "tma"
    configs.TUNED[Key("gemm", "specialised", 16, "long")] = configs.Tile(128, 256, 64, 4, 2)
    assert chosen("gemm")[0] == "tma"


_MISSING = """
import sys
from triton.experimental.gluon.language.nvidia import hopper
if sys.argv[1] == "all":
    sys.modules["triton.experimental.gluon"] = None
elif sys.argv[1] != "nothing":
    delattr(hopper, sys.argv[1])
from fusedmlp.kernels import configs
print(configs.gluon_missing())
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [("nothing", ""), ("all", "has no Gluon that fits: "), ("warpgroup_mma_init", "'warpgroup_mma_init'")],
)
def test_what_another_version_of_triton_lacks(what, said):
    done = forked.run("-c", _MISSING, what)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout if said else not done.stdout.strip()


_LAUNCHED = """
import json, sys, torch
from fusedmlp.kernels import configs
if sys.argv[1] == "without":
    configs.gluon_missing = lambda: "not there"
from fusedmlp.static_proof import cases, recorder, targets
names = []
def note(launch):
    names.append([launch.kernel, launch.path])
    return False
import fusedmlp.operators.triton_impl
with recorder.recording(targets.TARGETS["sm_90"], "long", specialised=configs.SPECIALISED, wanted=note):
    cases.CORE[sys.argv[2]](torch.bfloat16)
print(json.dumps(names))
"""


@pytest.mark.parametrize(
    ("gluon", "switch", "case", "expected"),
    [
        ("with", "1", "main_grad", ["fc1_act", "gemm", "dgrad_act", "gemm", "wgrad", "wgrad"]),
        ("with", "0", "main_grad", []),
        ("without", "1", "main_grad", []),
        ("with", "1", "several micro-batches", ["wgrad"]),
        # Sums of biases by the other kernel; weights apart have no descriptor, but operands of wgrad have.
        ("with", "1", "gpt-oss, biases, experts apart", ["wgrad", "wgrad"]),
        ("with", "1", "odd sizes, biases", []),
    ],
)
def test_what_a_layer_launches(gluon, switch, case, expected):
    done = forked.run("-c", _LAUNCHED, gluon, case, FUSEDMLP_SPECIALISED=switch)
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
    assert facts.machine().specialised == "yes, on Hopper"
    monkeypatch.setenv("FUSEDMLP_SPECIALISED", "0")
    assert facts.machine().specialised.startswith("only where tuned")
