"""The program for GPU machines, tried without one: on a driver that does nothing, and with steps that fail and hang."""

import csv
import json
import math
import re
import subprocess
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from gpu import bits, checks
from support import forked

from bench.gpu import archive, compare, jobs, rows, timings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "gpu"
# Some steps of `--small`: kernels of 16 and of 8 bits, both kinds of kernels, checks and times.
ONLY = ("bf16, default", "graph, default", "cases 1/6, warp", "sync", "tiny, even", "memcheck")


def bench_gpu(*arguments, cwd=ROOT, **environment):
    return forked.run("-m", "bench.gpu", *map(str, arguments), cwd=cwd, **environment)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_kernels_are_packed_and_run_elsewhere_and_results_go_on_and_compare(tmp_path):
    """One test, as each part needs the one before, and kernels take long to compile."""
    there, out = _pack(tmp_path), tmp_path / "results"
    output = _run(there, out)
    assert "was measured on no sm_90" in output
    _resume(there, out)
    _start_afresh(there, tmp_path / "fresh")
    _compare(there, out)


def _pack(folder):
    """Pack, and unpack in another place, which is returned."""
    done = bench_gpu("prepare", "--small", "--jobs", 2, "--only", *ONLY, "--out", folder / "packed.tar.gz")
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(folder / "packed.tar.gz") as file:
        names = [name.removeprefix("fusedmlp-gpu/") for name in file.getnames()]
        manifest = json.load(file.extractfile("fusedmlp-gpu/prepared/manifest.json"))
        groups = [file.extractfile(each).read().decode() for each in file.getnames() if "__grp__" in each]
        file.extractall(folder, filter="fully_trusted")
    assert {"fusedmlp/kernels", "bench/gpu/run.py", "tests/gpu/checks.py", "kernels/gemm/launch.py"} <= set(names)
    kinds = Counter(Path(name).suffix for name in names if name.startswith("prepared/cache/"))
    assert set(kinds) == {".cubin", ".json"}
    assert kinds[".cubin"] == len(groups) == int(manifest["kernels"]) > 10
    assert not any("/" in group for group in groups)  # they name files by paths of no machine
    assert manifest["target"] == "sm_90"
    assert re.search(rf"prepare: {kinds['.cubin']} kernels in \d+ s; [\d.]+ MiB in ", done.stdout)
    return folder / "fusedmlp-gpu"


def _run(there, out):
    """Everything runs, and nothing is compiled."""
    done = bench_gpu("--out", out, "--device", "sm_90", "--small", "--jobs", 2, "--only", *ONLY, cwd=there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 kernels compiled here" in done.stdout
    assert "FAIL" not in done.stdout
    wanted = [step.name for step in jobs.steps("sm_90", small=True) if any(text in step.name for text in ONLY)]
    assert {row["step"] for row in table(out / "steps.csv") if row["status"] == "ok"} == set(wanted)
    assert f"{len(wanted)} of {len(wanted)} steps ok" in done.stdout
    assert (out / "log.txt").read_text().count("\n== ") == len(wanted) - 1
    found = table(out / "timings.csv")
    assert tuple(found[0]) == rows.COLUMNS
    of = {(row["kernels"], row["load"], row["what"]): row for row in found}
    for kernels in ("default", "warp_specialized"):
        whats = (
            "step",
            "step, overwrite",
            "step, grad None",
            "sustained step",
            "pass wgrad fc1, overwrite",
            "tokens step",
        )
        for what in (*whats, "tokens step, overwrite", "tokens step, grad None"):
            assert math.isfinite(float(of[kernels, "even", what]["ms"]))
    for what in (
        "fp8 step, weights kept",
        "grouped_mm step+add",
        "grouped_mm step, grad None",
        "grouped_mm compiled step+add",
        "host tokens step",
    ):
        assert ("default", "even", what) in of
    assert of["default", "even", "peak memory"]["mib"]
    assert of["default", "", "dense product"]["tflops"]
    assert of["default", "even", "step"]["of_limit"]
    commit = json.loads((there / "prepared" / "manifest.json").read_text())["commit"]
    machine = {(row["gpu"], row["commit"], row["torch"], bool(row["date"])) for row in found}
    assert machine == {("no sm_90", commit, torch.__version__, True)}
    return done.stdout


def _resume(there, out):
    """A second run measures what is missing."""
    arguments = ("--out", out, "--device", "sm_90", "--small", "--only", "tiny, even, default")
    before = (out / "timings.csv").read_text()
    done = bench_gpu(*arguments, cwd=there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r": 0 of \d+ steps to run", done.stdout)
    assert (out / "timings.csv").read_text() == before
    steps = (out / "steps.csv").read_text().splitlines(keepends=True)
    (out / "steps.csv").write_text("".join(line for line in steps if "default: steps+first" not in line))
    groups = (out / "measured.txt").read_text()
    (out / "measured.txt").write_text(groups.replace("tiny, even, default: peak\n", ""))
    done = bench_gpu(*arguments, cwd=there)
    assert re.search(r": 1 of \d+ steps to run", done.stdout), done.stdout
    new = (out / "timings.csv").read_text().removeprefix(before).splitlines()
    assert [line.split(",")[3] for line in new] == ["peak memory", "grouped_mm peak memory"]


def _start_afresh(there, out):
    """Results of another GPU, torch or size are not mixed with these, and `--fresh` replaces them."""
    arguments = ("--out", out, "--device", "sm_90", "--only", "ceilings")
    assert bench_gpu(*arguments, "--small", cwd=there).returncode == 0
    done = bench_gpu(*arguments, cwd=there)
    assert done.returncode == 2
    assert re.search("expected results of .*'small': 'False'.*got .*'small': 'True'", done.stderr)
    steps = (out / "steps.csv").read_text()
    for old, new in (("no sm_90", "another"), (torch.__version__, "2.0")):
        (out / "steps.csv").write_text(steps.replace(old, new))
        done = bench_gpu(*arguments, "--small", cwd=there)
        assert done.returncode == 2
        assert re.search(f"got .*'{new}'", done.stderr)
    assert bench_gpu(*arguments, "--small", "--fresh", cwd=there).returncode == 0
    assert len(table(out / "timings.csv")) == 3


def _compare(there, out):
    """Committed results of the same GPU, changed here: what is slower, faster and missing is named."""
    found = table(out / "timings.csv")
    for row in found:
        changes = {"sustained step": 1 / 1.06, "step": 1.06, "forward": 1.04}
        row["ms"] = float(row["ms"]) * changes.get(row["what"], 1) if row["ms"] else ""
        if row["what"] == "tokens forward":
            row["shape"] = "huge"
    path = there / "bench" / "results" / "gpu" / "faked.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows.COLUMNS)
        writer.writeheader()
        writer.writerows(found)
    done = bench_gpu("compare", out, cwd=there)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    kinds = Counter(line.split(":")[0] for line in lines)
    assert kinds["slower"] == kinds["faster"] == kinds["missing"] == 2, done.stdout + done.stderr
    assert re.search(r"slower: tiny +even +default +sustained step: +0.9434 -> +1.0000 ms +\+6.0%", done.stdout)
    assert re.search(r"missing: huge +even +warp_specialized +tokens forward", done.stdout)
    assert lines[-1].startswith("2 slower, 2 faster, ")
    assert lines[-1].endswith(" 2 missing, 2 new")


def test_committed_results_compare_as_equal_with_themselves(tmp_path, capsys):
    """The H200's have the columns of an older program."""
    assert compare.main(tmp_path) == 2
    found = [row for row in rows.committed(RESULTS) if row["gpu"] == "NVIDIA H200"]
    assert {row["kernels"] for row in found} == {"default", "warp_specialized"}
    for row in found:
        rows.Table(tmp_path / "timings.csv").append({name: row.get(name, "") for name in rows.COLUMNS}, rows.COLUMNS)
    capsys.readouterr()
    assert compare.main(tmp_path) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"0 slower, 0 faster, {len(rows.by_key(found))} within 5%, 0 missing, 0 new"


def test_every_step_can_start():
    names = [step.name for step in jobs.steps("cuda", small=False)]
    assert len(names) == len(set(names))
    shapes = {*(shape.name for shape in (*timings.SHAPES, *timings.SMALL))}
    for step in jobs.steps("cuda", small=False):
        if step.module == "bench.gpu.timings":
            shape, load, *groups = step.arguments[:-2]
            assert shape in shapes
            assert load in timings.LOADS
            assert set(groups) <= set(timings.GROUPS)
        elif step.module == "gpu.checks":
            assert step.arguments[0] in checks.STEPS
        else:
            assert step in jobs.stacks("cuda")
    measured = {
        group for step in jobs.steps("cuda", small=False) for group in step.arguments if group in timings.GROUPS
    }
    assert measured == set(timings.GROUPS)


def test_checks_run_beside_each_other_and_times_alone():
    steps = jobs.steps("cuda", small=False)
    beside = [step.beside_others for step in steps]
    assert beside == sorted(beside, reverse=True)
    assert all(step.beside_others == (step.module == "gpu.checks") for step in steps if not step.prefix)
    assert all(step.beside_others for step in jobs.stacks("cpu"))


def test_every_time_of_ours_is_prepared():
    run, prepared = (
        {
            (*step.arguments[:2], group)
            for step in steps
            if step.module == "bench.gpu.timings"
            for group in step.arguments
        }
        for steps in (jobs.steps("cuda", small=False), jobs.steps("sm_90", small=False, large_peers=False))
    )
    left_out = {group for _, _, group in run - prepared} & set(timings.GROUPS)
    assert left_out == {"grouped_mm", "peak", "compiled", "liger", "sonicmoe"}


def test_the_memory_checker_sees_every_tensor_by_itself(monkeypatch):
    monkeypatch.setattr(jobs.shutil, "which", lambda name: f"/bin/{name}")
    (step,) = [step for step in jobs.steps("cuda", small=False) if step.name == "memcheck"]
    assert step.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert step.prefix[:3] == ("/bin/compute-sanitizer", "--tool", "memcheck")
    assert not step.beside_others


_STEPS = """
import sys
from bench.gpu import __main__ as program
from bench.gpu.jobs import Step
sys.path.insert(0, {folder!r})
steps = [Step(name, name, (), 100) for name in ("failing", "crashing", "hanging", "good")]
program.jobs.steps = lambda *_, **__: steps
sys.exit(program.main(sys.argv[1:]))
"""


_HANGING = """
import os, subprocess
with open("{path}", "w") as file:
    print(subprocess.Popen(["sleep", "600"]).pid, file=file)
os.wait()
"""


def _has_ended(file):
    """Look for the process whose id is in the file; True if it has ended, perhaps with nothing that waits for it."""
    started = Path("/proc", file.read_text().strip(), "stat")
    return not started.exists() or ") Z " in started.read_text()


@pytest.mark.slow
def test_a_failure_a_crash_and_a_hang_leave_the_other_steps_alone(tmp_path):
    modules = {
        "failing": "print('FAIL because'); raise SystemExit(3)",
        "crashing": "import os; os.abort()",
        "hanging": _HANGING.format(path=tmp_path / "pid"),
        "good": "print(5)",
    }
    for name, code in modules.items():
        (tmp_path / f"{name}.py").write_text(code)
    start = time.monotonic()
    out = tmp_path / "out"
    program = _STEPS.format(folder=str(tmp_path))
    arguments = ("--device", "sm_90", "--out", str(out), "--minutes", "0.15")
    done = forked.run("-c", program, *arguments, cwd=ROOT)
    assert done.returncode == 1
    assert time.monotonic() - start < 30
    for text in ("failing: exit status 3", "FAIL because", "crashing: killed by SIGABRT", "hanging: stopped after"):
        assert text in done.stdout, done.stdout + done.stderr
    assert "good: no time left" in done.stdout
    assert _has_ended(tmp_path / "pid")
    (tmp_path / "hanging.py").write_text("")
    done = forked.run("-c", program, *arguments, cwd=ROOT)
    assert "good: ok" in done.stdout, done.stdout + done.stderr
    (tmp_path / "failing.py").write_text("")
    (tmp_path / "crashing.py").write_text("")
    done = forked.run("-c", program, *arguments, cwd=ROOT)
    assert ": 2 of 4 steps to run" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


def test_steps_that_do_not_exist_are_refused(tmp_path):
    done = bench_gpu("--out", tmp_path, "--device", "sm_90", "--only", "sync", "timing-tiny")
    assert done.returncode == 2
    assert "--only: expected a part of the name of a step; got 'timing-tiny'" in done.stderr
    done = bench_gpu("prepare", "--out", tmp_path / "file.zip")
    assert done.returncode == 2
    assert "expected --out to end with .tar.xz, .tar.gz or .tar; got " in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = bench_gpu("--out", tmp_path / "out")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == "bench.gpu: expected a GPU; torch finds none. --device sm_90 tries the steps without one"
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "number"), [("bf16", 10), ("repeat", 10), ("invariant", 2), ("graph", 10)])
def test_the_checks_pass_on_interpreted_kernels(step, number, capsys):
    checks.main([step, "--device", "cpu", "--small"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= number
    assert all(line.startswith("ok ") for line in lines)


def test_a_wrong_result_is_a_failure(monkeypatch, capsys):
    run, cases = checks.Layer.run, checks.cases

    def wrong(self, impl):
        results = run(self, impl)
        results["dfc2"] = results["dfc2"] * 1.05
        return results

    monkeypatch.setattr(checks.Layer, "run", wrong)
    monkeypatch.setattr(checks, "cases", lambda small: {"add": cases(small)["add"]})
    with pytest.raises(SystemExit, match="2 failures"):
        checks.main(["bf16", "--device", "cpu", "--small"])
    assert "FAIL torch.bfloat16 add, ragged: AssertionError: dfc2" in capsys.readouterr().out


def test_one_bit_that_differs_between_runs_is_a_failure(monkeypatch, capsys):
    run, cases, flips = checks.Layer.run, checks.cases, iter([False, True, False, False])

    def flipped(self, impl):
        results = run(self, impl)
        if next(flips):
            results["dprobs"].view(torch.int32)[-1] ^= -(2**31)  # a zero's sign
        return results

    monkeypatch.setattr(checks.Layer, "run", flipped)
    monkeypatch.setattr(checks, "cases", lambda small: {name: cases(small)[name] for name in ("add", "apart")})
    with pytest.raises(SystemExit, match="1 failures"):
        checks.main(["repeat", "--device", "cpu", "--small"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL add: AssertionError: dprobs of run 2 differ")
    assert lines[1] == "ok   apart: the same bits in 2 runs"


def test_a_row_whose_bits_depend_on_others_is_a_failure(monkeypatch, capsys):
    """Only the larger crowd, and only at an odd address: the last that is compared."""
    run, crowd = bits.Layer.run, 4 * (bits.invariance.ROWS - 1) + 1

    def touched(self, rows=slice(None), counts=None, **where):
        results = run(self, rows, counts, **where)
        if isinstance(rows, list) and len(rows) == crowd and where["odd"]:
            results.dprobs[-1] = results.dprobs[-1].nextafter(torch.tensor(9.0))
        return results

    monkeypatch.setattr(bits.Layer, "run", touched)
    layer = bits.Layer("grouped_mlp", impl="torch")
    monkeypatch.setattr(bits, "layers", lambda *_: iter([("one", layer)]))
    with pytest.raises(SystemExit, match="1 failures"):
        checks.main(["invariant", "--device", "cpu", "--small"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL one: AssertionError: dprobs of row 128 differs from that at place 512 among 513 rows")


@pytest.mark.parametrize("name", ["y", "dfc1"])
def test_a_gradient_of_8_bits_that_is_not_a_number_is_a_failure(name):
    found = {"y": 1e-3, "dfc1": 2e-3, "dfc2": 1e-3}
    assert checks.largest(found) == 2e-3
    for wrong in (math.nan, 2 * checks.ALLOWED):
        with pytest.raises(AssertionError, match=f"at most {checks.ALLOWED}; got"):
            checks.largest(found | {name: wrong})


def test_kernels_of_one_name_keep_their_places_in_every_file(tmp_path):
    (tmp_path / "about.json").write_text('{"gpu": "G", "date": "2026-11-26", "commit": "c"}')
    for file, ms in (("first", 1), ("second", 2)):
        lines = [f"default,tiny,even,tokens kernel k,{ms}", f"default,tiny,even,tokens kernel k,{ms + 4}"]
        (tmp_path / f"{file}.csv").write_text("\n".join(["kernels,shape,load,what,ms", *lines]))
    found = rows.by_key(rows.committed(tmp_path))
    assert [(key[-1], row["ms"]) for key, row in found.items()] == [("1", "2"), ("2", "6")]


def test_the_commit_is_that_of_the_clone():
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(archive.commit().split("+")[0])


def test_what_is_ended_ends_its_steps(tmp_path):
    (tmp_path / "hanging.py").write_text(_HANGING.format(path=tmp_path / "pid"))
    arguments = [str(tmp_path), "--device", "sm_90", "--out", str(tmp_path / "out")]
    code = _STEPS.replace('"failing", "crashing", ', "").format(folder=str(tmp_path))
    process = forked.start(forked._command, ["-c", code, *arguments[1:]], ROOT, out=tmp_path / "log")
    deadline = time.monotonic() + 100
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    process.join()
    assert process.exitcode == 143, (tmp_path / "log").read_text()
    assert _has_ended(tmp_path / "pid")
