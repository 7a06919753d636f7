"""`python -m fusedmlp` as a shell starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fusedmlp
from fusedmlp.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        ("bench --roofline", ""),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("bench --roofline", "1"), ("bench --schedule --json", ""), ("bench --help", ""))
        ),
    ],
)
def test_a_reader_who_has_read_enough_ends_it_quietly(arguments, unbuffered):
    command = [sys.executable, "-m", "fusedmlp", *arguments.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fusedmlp {fusedmlp.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [("demo", "fusedmlp.demo.compare", "demo"), ("bench --report x", "bench.report.command", "bench")],
)
def test_a_missing_package_is_named_with_a_command_that_installs_it(arguments, module, extra, monkeypatch, capsys):
    class Missing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == module:
                raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    package = sys.modules.get(module.rpartition(".")[0])
    if package is not None:
        monkeypatch.delattr(package, module.rpartition(".")[2], raising=False)
    assert main(arguments.split()) == 2
    assert f"needs matplotlib: pip install matplotlib, or in a clone pip install -e '.[{extra}]'" in (
        capsys.readouterr().err
    )


def test_what_lies_in_bench_is_found_from_any_folder(tmp_path):
    """Also with an editable install, which finds fusedmlp alone."""
    (tmp_path / "fusedmlp").symlink_to(ROOT / "fusedmlp")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "fusedmlp", "bench", "--schedule"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shape, load, pass, GPU")
