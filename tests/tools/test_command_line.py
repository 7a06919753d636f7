"""`python -m fusedmlp` as a shell starts it."""

import os
import subprocess
import sys

import pytest


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
