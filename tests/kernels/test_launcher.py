"""Programs and direct launches, in processes without the interpreter; launches under the interpreter."""

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

from fusedmlp.kernels.launching.run import Launcher, Operator, recording

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "tests" / "kernels" / name for name in ("direct_launches.py", "programs.py")]
CHECKS = [
    (script, node.name.removeprefix("check_"))
    for script in SCRIPTS
    for node in ast.parse(script.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


# They compile kernels that no other check needs, each in a process of its own; the others share one.
EXHAUSTIVE = {
    "layers_of_every_kind",
    "other_operators",
    "segments",
    "tf32_is_asked_of_what_is_multiplied",
    "warp_specialized_kernels",
    "warp_specialized_kernels_that_copy_rows",
    "warp_specialized_kernels_that_gather_rows",
}


@cache
def _results(script, *names):
    done = forked.run(str(script), *names, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "name"),
    [pytest.param(*check, id=check[1], marks=[pytest.mark.exhaustive] * (check[1] in EXHAUSTIVE)) for check in CHECKS],
)
def test_without_a_gpu(script, name):
    together = [own for path, own in CHECKS if path == script and own not in EXHAUSTIVE]
    names = [name] if name in EXHAUSTIVE else together
    assert not (found := _results(script, *names)[name]), found


@pytest.mark.slow
def test_a_step_does_not_import_pytorchs_compiler():
    program = """if True:
        import sys
        from bench.host import cost as host_cost
        with host_cost.as_on_a_gpu():
            row = host_cost.layer(8, tokens=True)
            for _ in range(3):
                row.backward(row.forward())
        assert not {"torch._dynamo", "torch._inductor"} & {*sys.modules}
    """
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True)


@triton.jit
def _kernel(x_ptr, n, WIDTH: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, WIDTH), n)


def _plan(builder, x, n):
    builder.launch(_kernel, (1,), {"x_ptr": x, "n": n, "WIDTH": 4})


def test_recordings_inside_each_other():
    operator, x = Operator(_plan, None), torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
    with recording() as outer:
        with recording() as inner:  # empty, and so equal to the outer one
            pass
        operator(x, 3)
    assert (len(outer), len(inner)) == (1, 0)


@pytest.mark.parametrize("asked", [None, True, False])
def test_plans_see_whether_warp_specialized_kernels_are_asked_for(asked):
    targets, x = [], torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")

    def plan(builder, x):
        targets.append(builder.target)

    Operator(plan, asked)(x)
    Launcher(plan)(x, warp_specialized=asked)
    assert [target.warp_specialized for target in targets] == [asked, asked]


def test_what_a_program_cannot_return_is_refused():
    for part in (lambda new: new[1:], lambda new: new[0]):
        operator = Operator(lambda builder, x, part=part: part(builder.empty((4, 2), torch.float32)), None)
        with pytest.raises(ValueError, match="result: expected a whole tensor"):
            operator(torch.zeros(8))
    operator = Operator(lambda builder, x: x, None)
    with pytest.raises(ValueError, match="result: expected a whole tensor"):
        operator(torch.zeros(8))
    with pytest.raises(IndexError, match=r"expected array\[i\] or array\[start:\]"):
        Launcher(lambda builder, x: builder.empty((4,), torch.float32)[:2])(torch.zeros(8))


def test_an_argument_that_no_kind_describes_is_refused():
    operator = Operator(lambda builder, x, number: None, None)
    with pytest.raises(TypeError, match=r"operator: expected a tensor, .* got 0\.0"):
        operator(torch.zeros(8), 0.0)


def test_under_the_interpreter_launches_are_tritons():
    operator = Operator(_plan, None)
    for n in (3, 4, 3):
        x = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
        operator(x, n)
        assert x.tolist() == [n] * 4 + [0] * 4
