"""A world of gloo processes on the CPU, and what runs in each of them.

    python -m support.world RANK WORLD_SIZE RENDEZVOUS MODULE:FUNCTION OUT [ARGUMENTS]

calls the function with the arguments (JSON) and writes what it returns, which JSON must hold, to OUT. Its module is
imported before the process group starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parents[1]


def launch(function, world_size, folder, *arguments, timeout=1200):
    """Run `function` ("module:name") in every process of a new world; the results, by rank.

    Every rank is a process group, which is killed whole when it is over: a rank may have started others.
    """
    outs = [folder / f"{rank}.json" for rank in range(world_size)]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "support.world"]
    with ExitStack() as stack:
        processes, logs = [], []
        for rank, out in enumerate(outs):
            out.unlink(missing_ok=True)
            rest = [str(rank), str(world_size), str(folder / "store"), function, str(out), json.dumps(arguments)]
            log = stack.enter_context(open(folder / f"{rank}.log", "w+"))
            pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            process = stack.enter_context(subprocess.Popen(command + rest, env=env, start_new_session=True, **pipes))
            stack.callback(_kill_group, process)
            processes.append(process)
            logs.append(log)
        _wait(processes, timeout)
        (folder / "store").unlink(missing_ok=True)
        if any(process.returncode != 0 for process in processes):
            raise AssertionError("".join(map(_say, range(world_size), processes, logs)))
    return [json.loads(out.read_text()) for out in outs]


def _wait(processes, timeout):
    """Until all are over, or one has failed, on which the others would wait, or the time is."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            end = min(end, time.monotonic() + 10)  # the others may have something to say, too
        time.sleep(0.02)


def _kill_group(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _say(rank, process, log):
    log.seek(0)
    code = process.poll()
    return f"\nrank {rank} {'was still running' if code is None else f'ended with {code}'}:\n{log.read()[-4000:]}"


def _end_with_parent():
    """The rank does not outlive the process that launched it, however that ends."""

    def wait():
        os.read(0, 1)  # nobody writes: it returns when the other end is closed
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main(rank, world_size, store, function, out, arguments):
    import torch.distributed as dist

    _end_with_parent()
    warnings.simplefilter("ignore")  # that optional libraries are not there
    module, name = function.split(":")
    run = getattr(import_module(module), name)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=600)
    )
    Path(out).write_text(json.dumps(run(*arguments)))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # DDP keeps gloo's threads beyond that, and the interpreter's end can abort while they run (PyTorch issue 190489).
    os._exit(0)


if __name__ == "__main__":
    _, _rank, _world_size, *_rest = sys.argv
    _store, _function, _out, _arguments = _rest
    main(int(_rank), int(_world_size), _store, _function, _out, json.loads(_arguments))
