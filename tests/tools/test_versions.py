"""The versions of torch and Triton with which the library works."""

import re
from pathlib import Path

import pytest
import torch
from support import forked

import fusedmlp
from fusedmlp import environment, versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "supported"),
    [
        ("2.13.0+cpu", "3.7.1", True),
        ("2.12.1+cu128", "3.7.1", True),
        ("2.11.0a0+git0", "3.7.0", True),
        ("2.100.0.dev20270101+cu130", "4.0.0", True),
        ("3.0.0", None, True),  # without Triton, as on macOS
        ("2.10.0+cu128", "3.7.1", False),
        ("2.9.1", "3.7.1", False),
        ("2.11.0", "3.6.0", False),
        ("2.13.0", "3.6.0", False),
    ],
)
def test_old_versions_are_refused_in_one_sentence(torch_version, triton_version, supported, monkeypatch):
    monkeypatch.setattr(versions, "found", {"torch": torch_version, "triton": triton_version}.get)
    if supported:
        versions.check()
        return
    with pytest.raises(ImportError) as raised:
        versions.check()
    expected = (
        f"expected torch>=2.11 and triton>=3.7; got torch {torch_version} and triton {triton_version}, with which"
    )
    assert str(raised.value).startswith(f"fusedmlp: {expected}")


_IMPORT = """
import importlib.metadata, sys, torch
torch.__version__ = {torch!r}
importlib.metadata.version = lambda package: {triton!r}
import fusedmlp
fusedmlp.grouped_mlp
"""


@pytest.mark.parametrize("found", [{"torch": "2.10.0", "triton": "3.7.1"}, {"torch": "2.11.0", "triton": "3.6.0"}])
def test_the_import_looks(found):
    code = _IMPORT.format(**found)
    refused = forked.run("-c", code)
    assert refused.returncode == 1
    assert "ImportError: fusedmlp: expected torch>=2.11 and triton>=3.7; got" in refused.stderr
    assert not re.search(r"fusedmlp/(?!__init__|versions)\w+\.py", refused.stderr)  # before its other imports
    allowed = forked.run("-c", code, FUSEDMLP_UNSUPPORTED_VERSIONS="1")
    assert allowed.returncode == 0, allowed.stderr
    assert "UserWarning: fusedmlp: expected torch>=2.11" in allowed.stderr


def test_what_is_declared_is_what_is_checked_and_tested():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = dict(re.findall(r'^    "(torch|triton)>=([\d.]+)[;"]', project, re.MULTILINE))
    assert declared == versions.OLDEST
    pinned = dict(re.findall(r"^(torch|triton)==([\d.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    requirements = (ROOT / "tests" / "requirements-newest.txt").read_text(encoding="utf-8")
    newest = re.search(r"^torch==(.*)$", requirements, re.MULTILINE)[1]
    tritons, older = (
        re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE)[1].split() for name in ("TRITONS", "OLD_TORCHES")
    )
    assert {"torch": (*older, pinned["torch"], newest), "triton": (pinned["triton"], *tritons)} == versions.TESTED
    limits = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert f"torch {versions.OLDEST['torch']} or newer and Triton {versions.OLDEST['triton']} or newer" in limits
    assert ".".join(pinned["torch"].split(".")[:2]) == versions.OLDEST_COMPILED
    assert all(version in limits for tested in versions.TESTED.values() for version in tested)


def test_the_switch_is_set_by_bench_gpu_alone():
    mentions = {
        path.relative_to(ROOT).as_posix()
        for folder in ("fusedmlp", "bench", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if "FUSEDMLP_UNSUPPORTED_VERSIONS" in path.read_text(encoding="utf-8")
    }
    assert mentions == {"bench/gpu/__main__.py", "fusedmlp/environment.py", "fusedmlp/versions.py"}
    assert not environment.unsupported_versions()


_PROGRAM = """
import sys
from bench.gpu import __main__ as program, jobs
sys.path.insert(0, sys.argv.pop(1))
program.jobs.steps = lambda *_, **__: [jobs.Step("one", "printing", (), 60)]
sys.exit(program.main(sys.argv[1:]))
"""


def test_bench_gpu_sets_it_only_when_asked(tmp_path):
    (tmp_path / "printing.py").write_text("import os; print(os.environ['FUSEDMLP_UNSUPPORTED_VERSIONS'])")
    for options, expected in ([], "0"), (["--unsupported-versions", "--fresh"], "1"):
        arguments = [str(tmp_path), "--device", "sm_90", "--out", str(tmp_path), *options]
        done = forked.run("-c", _PROGRAM, *arguments, cwd=ROOT, FUSEDMLP_UNSUPPORTED_VERSIONS="1")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "log.txt").read_text().split() == ["==", "one:", "ok", expected]


_WARNS = """
import warnings
import pytest

@pytest.mark.parametrize("module", ["fusedmlp", "fusedmlp.contract.buffer", "torch.jit._script"])
def test_one(module):
    warnings.warn_explicit("soon", FutureWarning, "file.py", 1, module=module)
"""


@pytest.mark.slow
def test_with_a_newer_torch_only_our_own_warnings_are_errors(tmp_path):
    (option,) = set(re.findall(r"-o '(filterwarnings=.*)'", (ROOT / "Makefile").read_text(encoding="utf-8")))
    (tmp_path / "test_warns.py").write_text(_WARNS)
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", option, "-p", "no:cacheprovider"]
    done = forked.run("-c", code, *arguments, str(tmp_path / "test_warns.py"))
    assert "2 failed, 1 passed, 1 warning" in done.stdout, done.stdout
    assert set(re.findall(r"^FAILED .*\[(.*)\]", done.stdout, re.MULTILINE)) == {"fusedmlp", "fusedmlp.contract.buffer"}


def test_this_one_is_supported():
    assert versions.problem() == ""
    assert versions.found("torch") == torch.__version__
    assert fusedmlp.__version__
