"""Python processes without the seconds that importing PyTorch takes: forked by a server that has imported it.

Each process that asks has a server of its own, which ends with it. Kernels are compiled in what is forked, not
interpreted: `TRITON_INTERPRET` has no effect there, as Triton has been imported, too.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).parents[1]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "TRITON_INTERPRET": "0",
}

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])


def start(function, *args, out, err=None, **environment):
    """Start a process, leader of its group, that calls `function` with `args`, and writes to files `out` and `err`.

    Its exit status is as Python's would be. It ends by `os._exit`, so that functions registered with `atexit` do not
    run.
    """
    environment = os.environ | SETTINGS | environment
    args = environment, os.getcwd(), str(out), str(err or out), function, args
    process = _processes.Process(target=_main, args=args)
    with mock.patch.dict(os.environ, SETTINGS):  # for the server, which may have to start
        process.start()
    return process


def run(*arguments, cwd=None, **environment):
    """`python ARGUMENTS`, which begin with -m, -c or a script's path, as `subprocess.run` would return it."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(_command, list(arguments), cwd, out=out, err=err, **environment)
        try:
            process.join()
        finally:
            end(process)
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def end(process):
    """Kill a process, if it has not ended, and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # if it was not a group's leader yet
    process.join()


def stop_server():
    """End this process's server now, before a search for processes that are left behind."""
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
    util._run_finalizers()


def _end_with_parent():
    """End this process, and the processes that it started, when its parent has ended, however that ended."""

    def wait():
        multiprocessing.parent_process().join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _main(environment, cwd, out, err, function, args):
    os.setsid()
    _end_with_parent()
    for path, descriptor in ((out, 1), (err, 2)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    code = 0
    try:
        function(*args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # DDP's gloo threads still run, and the interpreter can abort at its end while they do (PyTorch issue 190489).
    os._exit(code)


def _command(arguments, cwd):
    os.chdir(cwd or os.getcwd())
    sys.path.insert(0, os.getcwd())
    if arguments[0] == "-m":
        sys.argv[1:] = arguments[2:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[1:] = arguments[2:]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
