"""`python -m fusedmlp` as a shell starts it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from support import forked

import fusedmlp
from bench.proof import command
from fusedmlp import command_line
from fusedmlp.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
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
    [("demo", "fusedmlp.demo.command", "demo"), ("bench --report x", "bench.report.command", "bench")],
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


@pytest.mark.slow
def test_what_lies_in_bench_is_found_from_any_folder(tmp_path):
    """Also with an editable install, which finds fusedmlp alone."""
    (tmp_path / "fusedmlp").symlink_to(ROOT / "fusedmlp")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "fusedmlp", "bench", "--schedule"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shape, load, pass, GPU")


def test_a_wrong_switch_ends_a_command_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("FUSEDMLP_DEBUG", "yes")
    assert main(["kernels"]) == 2
    assert capsys.readouterr() == ("", "FUSEDMLP_DEBUG: expected 0 or 1; got 'yes'\n")


WRONG_ARGUMENTS = {
    "doctor --hiden 64": ("fusedmlp doctor [-h]", "doctor: error: unrecognized arguments: --hiden 64"),
    "memory --tokens 1e6": ("memory [-h]", "argument --tokens: expected an integer of at least 1; got '1e6'"),
    "memory --tokens 0": ("memory [-h]", "argument --tokens: expected an integer of at least 1; got '0'"),
    "memory --experts 4 --top-k 8": ("", "memory: --top-k: expected at most --experts 4; got 8"),
    "compile --target sm_90 --experts 4": ("", "compile: --top-k: expected at most --experts 4; got 8"),
    "compile --experts 4": ("compile [-h]", "the following arguments are required: --target"),
    "kernels --write": ("", "kernels: expected --write and --table together with --hashes; got them alone"),
    "bench --report README.md": ("", f"bench: --report: expected a folder; got the file {ROOT}/README.md"),
}


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_with_what_was_expected(arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    try:
        status = main(arguments.split())
    except SystemExit as ended:
        status = ended.code
    usage, message = WRONG_ARGUMENTS[arguments]
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert usage in err.splitlines()[0]
    assert err.splitlines()[-1].endswith(message)


_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from fusedmlp.__main__ import main
for arguments in sys.argv[1:]:
    assert main(arguments.split()) == 2, arguments
assert main(["bench", "--roofline"]) == 0
from fusedmlp import versions
from fusedmlp.doctor import selftest
versions.found = {"torch": "2.13.0"}.get
selftest.run = lambda _: []
assert main(["doctor"]) == 0
"""


@pytest.mark.slow
def test_commands_that_need_triton_say_so():
    commands = ["kernels", "compile --target sm_90", "bench --schedule", "bench --roofline --eight-bit"]
    done = forked.run("-c", _WITHOUT_TRITON, *commands, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    says = [f"{each.split()[0]}: expected triton to be installed; got none: pip install triton" for each in commands]
    assert done.stderr.splitlines() == says
    assert "\n  none shown: triton is not installed\n" in done.stdout


@pytest.mark.slow
def test_the_module_that_needs_triton_says_so():
    code = "import runpy, sys; sys.modules['triton'] = None; runpy.run_module('bench.host', run_name='__main__')"
    done = forked.run("-c", code, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "bench.host: expected triton to be installed; got none: pip install triton\n"


def test_threads_of_the_demo_wait_asleep():
    done = subprocess.run(["make", "-n", "demo", "VENV=none"], capture_output=True, text=True, cwd=ROOT)
    assert "OMP_WAIT_POLICY=passive none/bin/python -m fusedmlp demo" in done.stdout


def test_make_explains_what_pip_says_before_it_says_so():
    done = subprocess.run(["make", "-n", "bench", "VENV=none"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    explained = done.stdout.index("pip may now say 'dependency conflicts'")
    assert explained < done.stdout.index("megatron-core torchtitan") < done.stdout.index("bench --report build/bench")


@pytest.mark.parametrize("name", ["fusedmlp.integrations.hub", "bench.report.figures"])
def test_help_writes_nothing(name, tmp_path, monkeypatch, capsys):
    main = import_module(name).main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr(Path, "open", None)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: python -m {name} [-h]")
    assert list(tmp_path.iterdir()) == []


def test_kernels_print_lines_where_there_is_no_terminal(monkeypatch, capsys):
    """Also while a set compiles."""

    def prove(tasks, jobs, called):
        for task in tasks:
            time.sleep(0.1)
            called(task)
        return []

    monkeypatch.setattr(command_line, "PROGRESS_SECONDS", 0.03)
    monkeypatch.setattr(command.proof, "prove", prove)
    command._compile(command.proof.tasks(["sm_90"])[:2], 1)
    found = re.findall(r"^compiling: (\d) of 2 sets, 0 s$", capsys.readouterr().err, re.MULTILINE)
    assert {"0", "1"} <= {*found}


@pytest.mark.slow
def test_a_full_disk_has_an_exit_status_of_its_own():
    command = [sys.executable, "-m", "fusedmlp", "bench", "--roofline"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (3, "fusedmlp: [Errno 28] No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "says"), [(signal.SIGINT, 130, "\ninterrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_a_signal_ends_kernels_and_its_workers(how, status, says, tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # a short path, as that of a socket must be
        environment = os.environ | {"TMPDIR": temporary, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        run = subprocess.Popen(
            [sys.executable, "-m", "fusedmlp", "kernels", "--target", "sm_90", "--jobs", "1"],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell makes runs in its background ignore SIGINT.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        )
        while not any(tmp_path.iterdir()):  # a worker compiles
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.05)
        started = psutil.Process(run.pid).children(recursive=True)
        if how is signal.SIGINT:  # as from a terminal
            os.killpg(run.pid, how)
        else:
            run.send_signal(how)
        assert run.communicate() == ("", says)
        assert run.returncode == status
        _, alive = psutil.wait_procs(started, timeout=10)
        assert alive == []
        assert os.listdir(temporary) == []
