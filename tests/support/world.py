"""A world of gloo processes on the CPU, and what runs in each of them.

    python -m support.world RANK WORLD_SIZE RENDEZVOUS MODULE:FUNCTION OUT [ARGUMENTS]

calls the function with the arguments (JSON) and writes what it returns, which JSON must hold, to OUT. Its module is
imported before the process group starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parents[1]


def launch(function, world_size, folder, *arguments, timeout=300):
    """Run `function` ("module:name") in every process of a new world; the results, by rank."""
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
            process = subprocess.Popen(command + rest, env=env, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.kill)
            processes.append(process)
            logs.append(log)
        for process in processes:
            process.wait(timeout=timeout)
        (folder / "store").unlink(missing_ok=True)
        for process, log in zip(processes, logs, strict=True):
            log.seek(0)
            assert process.returncode == 0, log.read()[-4000:]
    return [json.loads(out.read_text()) for out in outs]


def main(rank, world_size, store, function, out, arguments):
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # that optional libraries are not there
    module, name = function.split(":")
    run = getattr(import_module(module), name)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
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
