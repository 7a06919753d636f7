"""Direct launches and replays, in processes without the interpreter; and what `launch` does under it."""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support import forked
from support.grids import is_quick

from fusedmlp.kernels.launching.launcher import launch

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "tests" / "kernels" / name for name in ("direct_launches.py", "replays.py")]
CHECKS = [
    (script, node.name.removeprefix("check_"))
    for script in SCRIPTS
    for node in ast.parse(script.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


EXHAUSTIVE = {"replays_of_every_kind"}  # it compiles many kernels


@cache
def _results(script):
    names = [name for own, name in CHECKS if own == script and not (is_quick() and name in EXHAUSTIVE)]
    done = forked.run(str(script), *names, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("script", "name"),
    [pytest.param(*check, id=check[1], marks=[pytest.mark.exhaustive] * (check[1] in EXHAUSTIVE)) for check in CHECKS],
)
def test_without_a_gpu(script, name):
    assert not (found := _results(script)[name]), found


def test_recording_does_not_import_pytorchs_compiler():
    program = """if True:
        import sys, torch
        from fusedmlp.kernels.launching.recipe import Arguments
        from fusedmlp.kernels.launching.record import Recorder
        with Recorder(Arguments((), [], [], torch.device("cpu"))) as recorder:
            result = torch.empty(3)
        assert recorder.recipe(result).allocated == [((3,), torch.float32)]
        assert "torch._dynamo" not in sys.modules
    """
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True)


@triton.jit
def _kernel(x_ptr, n, WIDTH: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, WIDTH), n)


def test_under_the_interpreter_launches_are_tritons():
    x = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
    for n in (3, 4):
        launch(_kernel, (1,), x, n, WIDTH=4)
        assert x.tolist() == [n] * 4 + [0] * 4
