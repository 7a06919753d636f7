"""A run of the tests leaves no process and no temporary file, however it ends; see `support/clean_run.py`."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from support.clean_run import NAME, processes_of

CONFTEST = """
from pathlib import Path
from support.clean_run import CleanRun

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CleanRun(Path(__file__).parent))
"""
RANK = """
import os, subprocess, time
from pathlib import Path

def start_another():
    return subprocess.Popen(["sleep", "600"]).pid

def wait(folder):
    start_another()
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)
"""
TESTS = {
    "green": "    launch('rank:start_another', 2, tmp_path)",
    "red": "    launch('operator:truediv', 2, tmp_path, 1, 0)",
    "forgetful": "    import subprocess; subprocess.Popen(['sleep', '601'], start_new_session=True)",
    "slow": "    launch('rank:wait', 2, tmp_path, str(Path(__file__).parent / 'up'))",
}


@pytest.fixture
def temporary():
    """A folder for the run's temporary files; its path is short, because those of sockets must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.fixture
def start(tmp_path, temporary):
    """`start(kind)`: start a run of one test with two workers, as `make test` does; return its process and name."""
    (tmp_path / "up").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "rank.py").write_text(RANK)

    def start(kind):
        imports = "from pathlib import Path\nfrom support.world import launch\n"
        (tmp_path / "test_it.py").write_text(f"{imports}\ndef test_it(tmp_path):\n{TESTS[kind]}\n")
        name = f"{os.environ[NAME]}/{kind} {os.getpid()}"  # another worker may run the same kind
        path = os.pathsep.join(map(str, (*Path(__file__).parents[1:3], tmp_path)))
        plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        command = [sys.executable, "-m", "pytest", "-n", "2", *plugins, "test_it.py"]
        environment = os.environ | {NAME: name, "PYTHONPATH": path, "TMPDIR": temporary}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        # A shell makes runs in its background ignore SIGINT, and so all that they start.
        heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(command, cwd=tmp_path, env=environment, preexec_fn=heard, **options), name

    return start


def left_behind(root, temporary):
    return [*root.glob("build/tmp/*"), *Path(temporary).iterdir()]


@pytest.mark.parametrize(
    ("kind", "status", "says"),
    [
        pytest.param("green", 0, ["1 passed"], marks=pytest.mark.exhaustive),  # as is the run that this is in
        pytest.param(
            "red", 1, ["rank 0 ended with 1", "rank 1 ended with 1", "ZeroDivisionError"], marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "forgetful",
            1,
            [r"processes that were left behind, now ended:\n\d+ \(.*test_it.*\): sleep 601"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_run_that_ends_by_itself(kind, status, says, start, tmp_path, temporary):
    run, name = start(kind)
    shown, _ = run.communicate()
    assert run.returncode == status, shown
    for text in says:
        assert re.search(text, shown), shown
    assert processes_of(name) == []
    assert left_behind(tmp_path, temporary) == []


WAYS = [signal.SIGINT, *(pytest.param(how, marks=pytest.mark.exhaustive) for how in (signal.SIGTERM, signal.SIGKILL))]


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.name)
def test_a_run_that_is_interrupted(how, start, tmp_path, temporary):
    run, name = start("slow")
    while len(list((tmp_path / "up").iterdir())) < 2:  # both ranks are running
        assert run.poll() is None, run.stdout.read()
        time.sleep(0.1)
    if how is signal.SIGINT:  # as from a terminal
        os.killpg(run.pid, how)
    else:
        run.send_signal(how)
    shown, _ = run.communicate()
    assert run.returncode != 0, shown
    if how is signal.SIGKILL:  # no process is left to remove files; they are in the clone
        _, alive = psutil.wait_procs(processes_of(name), timeout=120)
        assert alive == []
    else:
        assert processes_of(name) == []
        assert left_behind(tmp_path, temporary) == []


FORKS_AND_IS_KILLED = """
import os, signal, sys, time
from support import forked

print(forked.start(time.sleep, 600, out=os.devnull).pid, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_forked_processes_do_not_outlive_their_parent():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", FORKS_AND_IS_KILLED], env=environment, **pipes) as asking:
        forked = psutil.Process(int(asking.stdout.readline()))
        assert forked.is_running()
        asking.stdin.write("\n")
    assert asking.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs([forked], timeout=60)
    assert alive == []
