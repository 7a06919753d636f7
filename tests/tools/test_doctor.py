"""`python -m fusedmlp doctor`."""

import json
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
from support import forked

import fusedmlp
from fusedmlp import versions
from fusedmlp.doctor import command, facts, paths, selftest
from fusedmlp.kernels import warp_specialized
from fusedmlp.kernels.tiles import select
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPBackwardArguments
from fusedmlp.recipe import BLOCKS

LAYER = {"E": 128, "H": 2048, "F": 768, "R": 65536, "dtype": "bfloat16", "weights": "packed"}
LAYER |= {"weight_layout": "out_in", "batch_invariant": False}


@pytest.mark.slow
def test_the_report_as_json_and_its_exit_status():
    done = forked.run("-m", "fusedmlp", "doctor", "--json", "--target", "sm_100", "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["supported_torch"] == "2.11 or newer, tested with 2.11.0, 2.12.1, 2.13.0, 2.15.0"
    assert report["machine"]["supported_triton"] == "3.7 or newer, tested with 3.7.1, 3.8.0, 3.9.0"
    assert report["kernels"]["layer"] == LAYER | {"dtype": "float16"}
    assert [row["name"] for row in report["kernels"]["passes"]] == [
        "fc1_act",
        "fc2",
        "dgrad_act",
        "dx",
        "wgrad fc2",
        "wgrad fc1",
        "fc1_act, tokens",
        "dgrad_act, tokens",
        "wgrad fc2, tokens",
        "wgrad fc1, tokens",
    ]
    assert [row["path"] for row in report["kernels"]["passes"]] == ["tma"] * 6 + ["gather"] * 4
    assert {row["name"]: row["ok"] for row in report["integrations"]}["Megatron-core"]
    checks = report["self_test"]["checks"]
    assert all(check["ok"] and "dfc2" in check["errors"] for check in checks)
    steps = [("float32", "plain"), ("float16", "plain"), ("float16", "checkpointed"), ("float16", "compiled")]
    assert [(check["dtype"], check["step"]) for check in checks] == steps
    assert report["status"] == 0


def _git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_clone_alone(tmp_path):
    _git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-q", "-m", "first")
    _git(tmp_path, "tag", "-a", "v1", "-m", "a tag")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert commit.startswith(facts.commit(tmp_path))
    assert len(facts.commit(tmp_path)) >= 7
    (tmp_path / "file").write_text("2")
    assert facts.commit(tmp_path).endswith("-dirty")
    (tmp_path / "environment").mkdir()  # as of a virtual environment in somebody's repository
    assert facts.commit(tmp_path / "environment") is None


def test_the_commit_that_pip_installed(monkeypatch, tmp_path):
    text = json.dumps({"url": "x", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}})
    monkeypatch.setattr(facts, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert facts.commit(tmp_path) == "0123abc"


@pytest.mark.slow
def test_wrong_switches_are_problems_with_an_exit_status_of_their_own():
    wrong = {"FUSEDMLP_DEBUG": "yes", "TRITON_INTERPRET": ""}
    done = forked.run("-m", "fusedmlp", "doctor", CXX="no-such-compiler", **wrong)
    assert done.returncode == 2
    assert "\nsupported_torch   2.11 or newer, tested with 2.11.0, 2.12.1, 2.13.0, 2.15.0\n" in done.stdout
    assert re.search(
        r"bfloat16  compiled +not run: torch.compile needs a C\+\+ compiler; there is no no-such-c", done.stdout
    )
    for name, value in wrong.items():
        assert f"PROBLEM: {name}: expected 0 or 1; got {value!r}" in done.stdout
    assert re.search(r"^  fc1_act           warp_specialized ", done.stdout, re.MULTILINE)


_GPT_OSS_20B = {"E": 32, "H": 2880, "F": 2880, "R": 32768}
_PATHS = """
import json, sys
from fusedmlp.doctor import paths
layer, cases = json.loads(sys.argv[1])
rows = []
for target, options in cases:
    tokens, card = options.pop("tokens", False), options.pop("card", "")
    passes = paths.passes(layer | options, target, card, tokens=tokens)
    rows.append([[row["path"], row["tile"], row["why"]] for row in passes])
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_paths_are_those_that_the_launchers_choose():
    cases = [
        ("sm_90", {}),
        ("sm_80", {}),
        ("sm_90", {"H": 2047}),
        ("sm_90", {"dtype": "float32"}),
        ("sm_90", {"weights": "separate"}),
        ("sm_90", {"weights": "megatron"}),
        ("sm_90", {"weights": "megatron_ddp"}),
        ("sm_90", {"R": 640}),
        ("sm_90", {"tokens": True}),
        ("sm_90", {"tokens": True, "R": 640}),
        ("sm_90", {"tokens": True, "F": 256}),
        ("sm_90", {"R": 640, "batch_invariant": True}),
        ("sm_90", {"weight_layout": "in_out"}),
        ("sm_90", {"weight_layout": "in_out", "tokens": True}),
        ("sm_90", {"weight_layout": "in_out", "F": 776}),
        ("sm_90", _GPT_OSS_20B | {"card": "NVIDIA H100 80GB HBM3"}),
        ("sm_90", _GPT_OSS_20B | {"card": "NVIDIA H200"}),
    ]
    done = forked.run("-c", _PATHS, json.dumps([LAYER, cases]))
    assert done.returncode == 0, done.stderr
    packed, old, odd, fp32, separate, megatron, ddp, short, *rest = json.loads(done.stdout)
    tokens, few_tokens, narrow_tokens, invariant, *in_out, h100, h200 = rest
    assert {path for path, _, _ in packed} == {path for path, _, _ in tokens} == {"warp_specialized"}
    assert [rows[0] for rows in in_out[:2]] == [packed[0], tokens[0]]  # fc1 with halves of [H, 2F], too
    assert in_out[2][0][0] == "unaligned"
    assert invariant == packed[:4] + short[4:]
    ahead = "; main_grad is loaded ahead, as memory is the limit"
    assert [why for _, _, why in packed[4:]] == [f"descriptors, warp-specialized{ahead}"] * 2
    assert [why for _, _, why in h100[4:]] == [f"descriptors, warp-specialized{ahead}"] * 2
    assert {why for _, _, why in h200[4:]} == {
        "descriptors, warp-specialized; TMA adds to main_grad, as MMAs are the limit"
    }
    first = "; rows of tokens are sorted first"
    assert [why for _, _, why in tokens[2:]] == [f"descriptors, warp-specialized{ahead}{first}"] * 2
    copy = "descriptors, warp-specialized, threads copy rows"
    assert [why for _, _, why in narrow_tokens[2:]] == [f"{copy}{ahead}"] * 2
    assert {path for path, _, _ in few_tokens} == {"gather"}
    assert {why for _, _, why in few_tokens} == {"descriptors, but for rows that are gathered: threads load these"}
    assert {(path, why) for path, _, why in old} == {("pointer", "pointers: sm_80 has no TMA")}
    no_vectors = "no vectors: H=2047 not a multiple of 16; not warp-specialized: no descriptor fits an operand"
    assert {(path, why) for path, _, why in odd} == {("unaligned", no_vectors)}
    assert [path for path, _, _ in fp32] == ["pointer"] * 4 + ["tma"] * 2
    assert {why for _, _, why in fp32[:4]} == {"pointers: no configuration with descriptors for torch.float32"}
    assert [path for path, _, _ in separate] == ["pointer"] * 4 + ["warp_specialized"] * 2
    apart = "pointers: experts lie in allocations of their own; not warp-specialized: no descriptor fits an operand"
    assert {why for _, _, why in separate[:4]} == {apart}
    assert megatron == packed  # evenly spaced, from the last expert to the first
    assert ddp == separate[:4] + packed[4:]  # of its own, DDP makes a buffer for main_grad alone
    assert [tile for _, tile, _ in short[:4]] != [tile for _, tile, _ in packed[:4]]


def test_megatron_settings_that_lead_to_other_paths(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "run", lambda _: [])
    monkeypatch.setattr(facts, "INTEGRATIONS", ())
    monkeypatch.setattr(command.environment, "triton_interpret", lambda: False)
    said = {"megatron": "bucket_size=1572864 spaces", "megatron_ddp": "use_distributed_optimizer=True", "separate": ""}
    for weights, words in said.items():
        command.run(LAYER | {"weights": weights}, "sm_90", as_json=True)
        note = json.loads(capsys.readouterr().out)["kernels"]["note"]
        assert words in note
        assert bool(words) == bool(note)
        command.run(LAYER | {"weights": weights}, "sm_90", as_json=False)
        assert note in " ".join(capsys.readouterr().out.split())


# Index of the output of the operators of a step, by the name that the self-test has for it.
_OUTPUTS = {
    "y": ("grouped_mlp", 0),
    "dx": ("grouped_mlp_backward_", 0),
    "dprobs": ("grouped_mlp_backward_", 1),
}
_WRITTEN = {"dfc1": "dw1", "dfc2": "dw2", "dbias1": "db1", "dbias2": "db2"}  # of MLPBackwardArguments


def _wrong(check):
    """The names of results that are off by more than is allowed; the check says so."""
    wrong = {name for name, error in check["errors"].items() if not error <= check["allowed"]}
    assert check["ok"] == (not wrong)
    assert not wrong or set(re.findall(r"(\w+): error", check["note"])) == wrong
    return wrong


def _all_but_some(names, some):
    return [pytest.param(name, marks=[] if name in some else pytest.mark.exhaustive) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("result", _all_but_some([*_OUTPUTS, *_WRITTEN], ("dx", "dprobs", "dfc1")))
@pytest.mark.parametrize(
    "breakage", ["one element is off", pytest.param("one element is NaN", marks=pytest.mark.exhaustive)]
)
def test_the_self_test_sees_a_broken_operator(result, breakage, monkeypatch):
    name, index = _OUTPUTS.get(result, ("grouped_mlp_backward_", _WRITTEN.get(result)))
    operator = getattr(ops, name)

    def broken(*args):
        results = operator(*args)
        tensor = getattr(MLPBackwardArguments(*args), index)[0] if result in _WRITTEN else results[index]
        off = 5e-6 * tensor.abs().max() if breakage == "one element is off" else float("nan")
        tensor.view(-1)[5] += off
        return results

    monkeypatch.setattr(ops, name, broken)
    checks = selftest.run(torch.float32, ["plain"])
    assert [_wrong(check) for check in checks] == [{result}] * 2
    assert [check["implementation"] for check in checks] == ["torch", "triton"]  # under the interpreter, as tests are


@pytest.mark.slow
def test_the_self_test_sees_a_step_that_only_checkpointing_or_compiling_breaks(monkeypatch):
    monkeypatch.setattr(selftest, "checkpoint", lambda forward, *args, use_reentrant: 1.1 * forward(*args))
    monkeypatch.setattr(torch, "compile", lambda forward, **_: lambda *args: 1.1 * forward(*args))
    checks = selftest.run(torch.bfloat16)
    wrong = {(check["implementation"], check["step"]) for check in checks if not check["ok"]}
    assert wrong == {(impl, step) for impl in ("torch", "triton") for step in ("checkpointed", "compiled")}
    assert {check["dtype"] for check in checks if check["step"] != "plain"} == {"bfloat16"}


def test_the_self_test_sees_a_gradient_that_is_not_fused(monkeypatch):
    monkeypatch.setattr("fusedmlp.contract.destinations.main_grad.MainGrad.written", lambda *_: None)
    assert [_wrong(check) for check in selftest.run(torch.float32, ["plain"])] == [{"dfc1", "dfc2"}] * 2


def test_an_operator_that_raises_does_not_end_the_report(monkeypatch):
    monkeypatch.setattr(ops, "grouped_mlp_backward_", lambda *_: 1 / 0)
    for check in selftest.run(torch.float32, ["plain"]):
        assert (check["ok"], check["note"]) == (False, "ZeroDivisionError: division by zero")


def test_wrong_numbers_have_their_own_exit_status(monkeypatch, capsys):
    checks = selftest.run(torch.float32, ["plain"])
    wrong = checks[0] | {"ok": False, "errors": {"dx": float("nan")}, "note": "dx: error nan, allowed 1.0e-06"}
    monkeypatch.setattr(selftest, "run", lambda _: [wrong])
    assert command.run(LAYER, None, as_json=False) == 1
    printed = capsys.readouterr().out
    assert "error nan, allowed 1.0e-06  WRONG" in printed
    assert "The numbers are wrong" in printed


_SHORT = "in bf16, .* fewer than 64 rows an expert on average"


@pytest.mark.parametrize(
    ("sizes", "rows", "fp8_block", "mxfp8"),
    [
        ({}, "512", "in 8 bits", "in 8 bits"),
        ({"R": 128 * 64}, "64", "in 8 bits", "in 8 bits"),
        ({"R": 128 * 64 - 32}, "63.75", _SHORT, _SHORT),
        ({"R": 1280, "batch_invariant": True}, "10", "in 8 bits", "in 8 bits"),
        ({"F": 96}, "512", "refused: fc2_weight: .* multiples of 128 .*; got 2048 out and 96 in", "in 8 bits"),
        ({"F": 96, "R": 1280}, "10", "refused: fc2_weight: .* multiples of 128 ", _SHORT),
        ({"H": 1000}, "512", "refused: .* multiples of 128 ", "refused: .* multiples of 32 .* got 1000 out"),
    ],
)
def test_what_a_layer_computes_with_8_bit_recipes(sizes, rows, fp8_block, mxfp8, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "run", lambda _: [])
    monkeypatch.setattr(facts, "INTEGRATIONS", ())
    command.run(LAYER | sizes, None, as_json=False)
    printed = capsys.readouterr().out
    assert "kernels for sm_90 (fp8_block), and sm_100, sm_120 and gfx950 (mxfp8); both on the CPU." in printed
    assert f"This layer, with {rows} rows an expert on average:" in printed
    command.run(LAYER | sizes, None, as_json=True)
    found = json.loads(capsys.readouterr().out)["eight_bit"]
    assert found.keys() == BLOCKS.keys()
    for recipe, expected in (("fp8_block", fp8_block), ("mxfp8", mxfp8)):
        assert re.fullmatch(f"{expected}.*", found[recipe])
        assert f"  {recipe:<11}{found[recipe]}\n" in printed


def test_a_layer_computes_what_the_doctor_says():
    """64 rows an expert on average, and one row fewer in all; 8 bits are another result than bf16."""
    for rows, computed in ((128, "in 8 bits"), (127, "in bf16")):
        x, fc1, fc2 = torch.randn(rows, 128), torch.randn(2, 256, 128), torch.randn(2, 128, 128)
        plain, *ys = (
            fusedmlp.grouped_mlp(x, fc1, fc2, [rows, 0], impl="torch", recipe=name) for name in ("bf16", *BLOCKS)
        )
        for recipe, y in zip(BLOCKS, ys, strict=True):
            assert facts.eight_bit(2, 128, 128, rows)[recipe].startswith(computed)
            assert torch.equal(y, plain) == (computed == "in bf16")


def test_old_versions_are_problems(monkeypatch):
    monkeypatch.setattr(versions, "found", {"torch": "2.10.0+cu128", "triton": "3.6.0"}.get)
    (problem,) = facts.machine()["problems"]
    assert "expected torch>=2.11 and triton>=3.7; got torch 2.10.0+cu128 and triton 3.6.0" in problem


@pytest.fixture
def one_gpu(monkeypatch):
    """A stand-in for a GPU; returns the list that `torch.cuda.get_device_capability` returns, for tests to change."""
    capability = [9, 0]
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(facts, "_driver", lambda: "580.1")
    select.architecture.cache_clear()
    yield capability
    select.architecture.cache_clear()


@pytest.mark.parametrize(
    ("target", "here", "card"), [("sm_90", "sm_90", "NVIDIA H100"), ("sm_90", "sm_80", ""), ("sm_90", None, "")]
)
def test_kernels_are_planned_for_the_card_that_is_here(target, here, card, monkeypatch):
    planned = []
    monkeypatch.setattr(command.environment, "triton_interpret", lambda: False)
    monkeypatch.setattr(paths, "passes", lambda _, *of, **options: planned.append(of) or [])
    gpu = None if here is None else "NVIDIA H100"
    command._kernels(LAYER, target, {"triton": "3.7.1", "gpu": gpu, "architecture": here})
    assert planned == [(target, card)] * 2


def test_a_gpu_is_described(one_gpu):
    machine = facts.machine()
    assert (machine["gpu"], machine["memory_gib"], machine["multiprocessors"]) == ("NVIDIA H100", 80, 132)
    assert (machine["driver"], machine["implementation"], machine["problems"]) == ("580.1", "triton", [])


def test_a_gpu_that_is_too_old_is_a_problem(one_gpu, monkeypatch):
    one_gpu[:] = [7, 5]
    warp_specialized.gluon_missing()  # imports Gluon, which asks for what the next line changes
    monkeypatch.setattr(select.triton.knobs.runtime, "interpret", False)
    (problem,) = facts.machine()["problems"]
    assert "expected compute capability 8.0 or newer; got 7.5" in problem


def test_an_integration_that_cannot_be_imported_says_why(monkeypatch):
    missing = ("Nothing", "no-such-package", "megatron", "no_such_package", "")
    broken = ("Broken", "torch", "no_such_module", "", "")
    monkeypatch.setattr(facts, "INTEGRATIONS", (missing, broken))
    rows = facts.integrations()
    assert [row["ok"] for row in rows] == [False, False]
    assert rows[0]["why_not"] == "not installed: pip install no-such-package"
    assert "ModuleNotFoundError: No module named 'fusedmlp.integrations.no_such_module'" in rows[1]["why_not"]
