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
from datetime import timedelta
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parents[1]


def launch(function, world_size, folder, timeout=300):
    """Run `function` ("module:name") in every process of a new world; the results, by rank."""
    outs = [folder / f"{rank}.json" for rank in range(world_size)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "support.megatron_world", str(rank), str(world_size), str(folder / "store"), function, str(out)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    output = []
    try:
        for process in processes:
            output.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, output, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [json.loads(out.read_text()) for out in outs]


def start(rank, world_size, store):
    """Process groups; megatron-core asks for the current GPU and its stream here and there."""
    import torch
    import torch.distributed as dist

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_, **__: None
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
