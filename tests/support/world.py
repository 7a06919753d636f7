"""Runs a function in a world of gloo processes on the CPU."""

from __future__ import annotations

import json
import time
import warnings
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from pathlib import Path

from support import forked


def launch(function, world_size, folder, *arguments, timeout=1200):
    """Run `function` ("module:name") in every process of a new world; return its results by rank.

    JSON must hold arguments and results. The function's module is imported before `torch.distributed` starts. Every
    rank leads a group of processes, which is killed when the rank has ended: it may have started others.
    """
    outs = [folder / f"{rank}.json" for rank in range(world_size)]
    logs = [folder / f"{rank}.log" for rank in range(world_size)]
    with ExitStack() as stack:
        ranks = []
        for rank, (out, log) in enumerate(zip(outs, logs, strict=True)):
            out.unlink(missing_ok=True)
            log.unlink(missing_ok=True)
            rest = rank, world_size, str(folder / "store"), function, str(out), json.dumps(arguments)
            ranks.append(forked.start(main, *rest, out=log))
            stack.callback(forked.end, ranks[-1])
        _wait(ranks, timeout)
        (folder / "store").unlink(missing_ok=True)
        if any(rank.exitcode != 0 for rank in ranks):
            raise AssertionError("".join(map(_say, range(world_size), ranks, logs)))
    return [json.loads(out.read_text()) for out in outs]


def _wait(ranks, timeout):
    """Wait until all ranks have ended, one has failed (the others would wait for it), or time is up."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.exitcode for process in ranks]
        if None not in codes:
            return
        if any(codes):
            end = min(end, time.monotonic() + 10)  # the others may fail by themselves, too, with messages
        time.sleep(0.02)


def _say(rank, process, log):
    code, said = process.exitcode, log.read_text()[-4000:] if log.exists() else ""
    return f"\nrank {rank} {'was still running' if code is None else f'ended with {code}'}:\n{said}"


def main(rank, world_size, store, function, out, arguments):
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # optional libraries are missing
    module, name = function.split(":")
    run = getattr(import_module(module), name)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=600)
    )
    Path(out).write_text(json.dumps(run(*json.loads(arguments))))
    dist.barrier()
    dist.destroy_process_group()
