"""A world of gloo processes in which megatron-core runs on the CPU, and what runs in each of them.

    python -m support.megatron_world RANK WORLD_SIZE RENDEZVOUS MODULE:FUNCTION OUT

calls the function, which returns something that JSON can hold, and writes it to OUT.
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
from unittest import mock

TESTS = Path(__file__).parents[1]


def launch(function, world_size, folder, timeout=300):
    """Run `function` ("module:name") in every process of a new world; the results, by rank."""
    outs = [folder / f"{rank}.json" for rank in range(world_size)]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "support.megatron_world"]
    with ExitStack() as stack:
        processes = []
        for rank, out in enumerate(outs):
            arguments = [str(rank), str(world_size), str(folder / "store"), function, str(out)]
            process = subprocess.Popen(
                command + arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.callback(process.kill)
            processes.append(process)
        output = [process.communicate(timeout=timeout)[0] for process in processes]
    for process, text in zip(processes, output, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [json.loads(out.read_text()) for out in outs]


def start(rank, world_size, store):
    """Process groups; megatron-core asks for the current GPU and its streams here and there: one for all."""
    import torch
    import torch.distributed as dist

    stream = mock.Mock()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: stream
    torch.cuda.synchronize = lambda *_: None
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )


def main(arguments):
    rank, world_size, store, function, out = arguments
    warnings.simplefilter("ignore")  # that TransformerEngine and Apex are not there
    start(int(rank), int(world_size), store)
    module, name = function.split(":")
    result = getattr(import_module(module), name)()
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
