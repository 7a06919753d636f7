"""The example of expert parallelism, also as a user starts it."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel.py"


def by_torchrun(arguments, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_forked_processes(arguments, folder):
    """As torchrun does, without the seconds of importing PyTorch."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    logs = folder / "0.log", folder / "1.log"
    ranks = [
        forked.start(rank_of_example, arguments, out=log, **world, RANK=str(rank), LOCAL_RANK=str(rank))
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


def rank_of_example(arguments):
    sys.argv[:] = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.parametrize("start", [in_forked_processes, pytest.param(by_torchrun, marks=pytest.mark.exhaustive)])
def test_the_example_equals_one_process(start, tmp_path):
    """So many experts that some get no tokens; differences are of gradients, relative to the largest of each."""
    steps, out = 5, tmp_path / "results.json"
    assert "| fc1 |" in start(["--steps", str(steps), "--experts", "192", "--json", str(out)], tmp_path)
    results = json.loads(out.read_text())
    assert results["world_size"] == 2
    rounding = 16 * torch.finfo(torch.float32).eps
    assert results["largest_differences"].keys() >= {"fc1", "fc2", "moe.router.weight", "first.weight", "last.bias"}
    assert all(difference < rounding for difference in results["largest_differences"].values())
    losses = zip(results["losses"], results["losses_in_one_process"], strict=True)
    assert all(abs(loss - reference) < rounding for loss, reference in losses)
    assert results["losses"][-1] < results["losses"][0] - 0.02
    assert results["idle_experts"] > 0
    assert results["overlapped_weight_gradients"] == steps * 2 * 2  # micro-batches, fc1 and fc2
