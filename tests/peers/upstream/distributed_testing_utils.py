"""Stand-in for what starts the ranks of distributed tests: on the CPU, with gloo.

Ranks are forked by a server that has imported Transformers. How often each function computed experts there is added to
the counts of this process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from peers import default_experts

PATIENCE = timedelta(seconds=120)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["peers.ranks"])


def run_distributed(world_size):
    """`run_distributed(world_size)(function)(*args)` calls `function(rank, *args)` in ranks of one process group."""

    def decorate(function):
        def run(*args):
            with tempfile.TemporaryDirectory() as folder:
                store = f"file://{Path(folder, 'store')}"
                _start_rank_processes(_in_group, args=(store, world_size, function, args), nprocs=world_size)

        return run

    return decorate


def _in_group(rank, store, world_size, function, args):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    function(rank, *args)
    dist.barrier()


def _start_rank_processes(function, args, nprocs):
    """Call `function(rank, *args)` in `nprocs` processes; raises what the first rank that failed says."""
    pipes = [_processes.Pipe(duplex=False) for _ in range(nprocs)]
    ranks = [
        _processes.Process(target=_rank, args=(sender, rank, function, args), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    failures = []
    try:
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        for rank, (receiver, _) in enumerate(pipes):
            try:
                if not receiver.poll(2 * PATIENCE.total_seconds()):
                    failures.append(f"rank {rank}: no answer")
                    continue
                error, calls = receiver.recv()
            except EOFError:
                failures.append(f"rank {rank}: ended without an answer")
                continue
            default_experts.calls.update(calls)
            if error:
                failures.append(f"rank {rank}: {error}")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if failures:
        raise AssertionError("\n".join(failures))


def _rank(sender, rank, function, args):
    error = None
    try:
        import peers.ranks  # noqa: F401  (the server has, or says nothing of why it could not)

        torch.set_num_threads(1)
        function(rank, *args)
    except BaseException:
        error = traceback.format_exc()
    sender.send((error, dict(default_experts.calls)))
    sender.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group


def _get_distributed_device_type():
    return "cpu"


def _get_distributed_backend():
    return "gloo"


def _get_rank_device(rank):
    return torch.device("cpu")


def _set_rank_device(rank):
    """Nothing to choose."""
