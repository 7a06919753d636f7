"""Examples of two ranks, as a user starts them, or without the seconds of importing PyTorch."""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

from support import forked

EXAMPLES = Path(__file__).parents[2] / "examples"


def by_torchrun(example, arguments, folder):
    """Run an example by torchrun; return what the ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(EXAMPLES / example), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_forked_processes(example, arguments, folder):
    """Run an example in two forked processes; return what rank 0 prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    logs = folder / "0.log", folder / "1.log"
    ranks = [
        forked.start(_rank, example, arguments, out=log, **world, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank, log in enumerate(logs)
    ]
    try:
        for rank, log in zip(ranks, logs, strict=True):
            rank.join()
            assert rank.exitcode == 0, log.read_text()[-3000:]
    finally:
        for rank in ranks:
            forked.end(rank)
    return logs[0].read_text()


def _rank(example, arguments):
    sys.argv[:] = [str(EXAMPLES / example), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
