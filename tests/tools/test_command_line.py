"""`python -m fusedmlp` as a shell starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_what_lies_in_bench_is_found_from_any_folder(tmp_path):
    """Also with an editable install, which finds fusedmlp alone."""
    (tmp_path / "fusedmlp").symlink_to(ROOT / "fusedmlp")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "fusedmlp", "bench", "--schedule"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shape, load, pass, GPU")


def test_a_wrong_switch_ends_a_command_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("FUSEDMLP_TUNED", "yes")
    assert main(["kernels"]) == 2
    assert capsys.readouterr() == ("", "FUSEDMLP_TUNED: expected 0 or 1; got 'yes'\n")
