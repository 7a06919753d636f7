"""Direct launches, in a process without the interpreter; and what `launch` does under it."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fusedmlp.kernels.launcher import launch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "direct_launches.py"
NAMES = [
    node.name.removeprefix("check_")
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def results():
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_direct_launches(name, results):
    assert not results[name], results[name]


@triton.jit
def _kernel(x_ptr, n, WIDTH: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, WIDTH), n)


def test_under_the_interpreter_launches_are_tritons():
    x = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
    for n in (3, 4):
        launch(_kernel, (1,), x, n, WIDTH=4)
        assert x.tolist() == [n] * 4 + [0] * 4
