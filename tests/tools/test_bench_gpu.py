"""The program for GPU machines, tried without one: steps run, and failures and hangs do not stop other steps."""

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import forked
from support.grids import is_quick

from bench.gpu import steps

ROOT = Path(__file__).parents[2]


def run(*arguments, interpret="0"):
    environment = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.exhaustive
def test_everything_runs_on_tiny_shapes(tmp_path):
    names = ["timings-tiny"] if is_quick() else ["cases", "bf16", "fp16", "sync", "graph", "repeat", "timings-tiny"]
    only = ["--only", *names] if is_quick() else []
    done = forked.run("-m", "bench.gpu", "--out", str(tmp_path), "--device", "cpu", *only, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "timings.csv"}
    log = (tmp_path / "log.txt").read_text()
    assert re.findall(r"^== (.*): ok$", log, re.MULTILINE) == names
    with (tmp_path / "timings.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["what"] for row in rows} >= {
        "dense product",
        "copy",
        "forward",
        "backward",
        "forward + backward",
        "grouped_mm forward + backward",
    }
    assert {row["load"] for row in rows} == {"", "even", "zipf", "quarter empty"}
    assert all(math.isfinite(float(row["ms"])) for row in rows if row["load"])  # backward's is a difference


def test_steps_that_do_not_exist_are_refused(tmp_path):
    done = forked.run("-m", "bench.gpu", "--out", str(tmp_path), "--device", "cpu", "--only", "timing-tiny", cwd=ROOT)
    assert done.returncode == 2
    assert "--only: expected a part of the name of a step; got 'timing-tiny'" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    assert steps.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "bench.gpu: expected a GPU; torch finds none. --device cpu tries the steps without one"
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", ["bf16", "repeat", "graph"])
def test_the_checks_pass_on_interpreted_kernels(step):
    done = run("gpu.checks", step, "--device", "cpu", "--small", interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout


def in_bench(code):
    return forked.run("-c", f"from bench.gpu import steps\nfrom gpu import checks\n{code}", cwd=ROOT)


def test_a_failure_and_a_hang_leave_the_other_steps_alone(tmp_path):
    done = in_bench(
        "import sys; from pathlib import Path\n"
        "def step(name, code, seconds): return steps.Step(name, (sys.executable, '-c', code), seconds)\n"
        "steps.steps = lambda device, out: [\n"
        "    step('bad', 'print(\"FAIL because\"); raise SystemExit(3)', 300),\n"
        "    step('hang', 'import time; time.sleep(60)', 1),\n"
        "    step('good', 'print(5)', 300)]\n"
        f"sys.exit(steps.main(['--device', 'cpu', '--out', {str(tmp_path)!r}]))"
    )
    assert done.returncode == 1
    for text in ("bad: exit status 3", "FAIL because", "hang: stopped after 1 s", "good: ok"):
        assert text in done.stdout, done.stdout + done.stderr


def test_no_step_starts_without_time(tmp_path):
    done = run("bench.gpu", "--out", str(tmp_path), "--device", "cpu", "--minutes", "0")
    assert done.returncode == 1
    assert "bf16: no time left" in done.stdout


@pytest.mark.exhaustive
def test_a_wrong_result_is_a_failure():
    done = in_bench(
        "import torch\n"
        "run = checks.Layer.run\n"
        "def wrong(self, impl):\n"
        "    results = run(self, impl)\n"
        "    results['dfc2'] = results['dfc2'] * 1.05\n"
        "    return results\n"
        "checks.Layer.run = wrong\n"
        "checks.numerics(torch.bfloat16, 'cpu', True)"
    )
    assert done.returncode == 1
    assert "FAIL torch.bfloat16 add, ragged: AssertionError: dfc2" in done.stdout


@pytest.mark.parametrize(("switch", "kernels"), [("0", "default"), ("1", "warp_specialized")])
def test_rows_say_which_kernels_they_are_of(switch, kernels):
    code = "from bench.gpu import timings; print(timings.machine('cpu')['kernels'])"
    done = forked.run("-c", code, cwd=ROOT, FUSEDMLP_WARP_SPECIALIZED=switch)
    assert done.stdout.strip() == kernels, done.stderr


def test_both_kinds_of_kernels_run_next_to_each_other():
    done = in_bench("from pathlib import Path\nprint(*[step.name for step in steps.steps('cuda', Path('.'))])")
    names = done.stdout.split()
    for one in ("cases", "bf16", "timings-qwen3-30b-8k", "timings-sonic-c"):
        assert names[names.index(one) + 1] == f"{one}-warp_specialized"


def test_the_memory_checker_sees_every_tensor_by_itself():
    done = in_bench(
        "from pathlib import Path\n"
        "steps.shutil.which = lambda name: '/bin/' + name\n"
        "step, = [s for s in steps.steps('cuda', Path('.')) if s.name.startswith('memcheck')]\n"
        "print(*step.command)"
    )
    assert done.stdout.startswith("env PYTORCH_NO_CUDA_MEMORY_CACHING=1 /bin/compute-sanitizer --tool memcheck")
