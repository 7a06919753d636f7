"""Forward and backward beside peers on a CPU: one and all threads, glibc's default and freed memory kept.

    python -m bench.cpu.settings [--json]

Each setting runs all layers in a process of its own. Peers take turns, and each is first equally often; a figure is the
median time of a peer over ours. Unless glibc is told to keep freed memory, it maps and returns large tensors again and
again; the cost of that depends on how much memory a peer takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from bench.cpu import layers, recording
from bench.cpu.peers import PEERS, Peer
from bench.limits.shapes import LOADS

ALLOCATIONS = ("default", "kept")
OURS = {"rows": "fusedmlp", "tokens": "fusedmlp moe_experts"}
OTHERS = ("grouped_mm", "Transformers grouped_mm")
ROUNDS, WARM_UP = 12, 2  # rounds: a multiple of the number of peers

Ratios = list[dict[str, Any]]


def measure() -> Ratios:
    """Measure in this process's setting: a row for each layer and peer."""
    peers = [peer for peer in PEERS if peer.name in (*OURS.values(), *OTHERS) and not peer.missing("cpu")]
    cases = [(s, load, d) for s in layers.CPU_SHAPES for load in LOADS for d in (torch.float32, torch.bfloat16)]
    found: Ratios = []
    for i, case in enumerate(cases):
        layer = layers.Layer(*case, "cpu")
        print(f"\r{i + 1} of {len(cases)}: {layer}".ljust(60), end="", file=sys.stderr, flush=True)
        ms = _medians(layer, peers)
        for peer in peers:
            if peer.name in OTHERS:
                times = zip(("forward", "backward"), ms[peer.name], ms[OURS[peer.level]], strict=True)
                found.append({"layer": str(layer), "peer": peer.name} | {what: them / us for what, them, us in times})
    print(file=sys.stderr)
    return found


def _medians(layer: layers.Layer, peers: list[Peer]) -> dict[str, list[float]]:
    """Median seconds of forward and of backward, by peer."""
    times: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer in peers}
    for turn in range(WARM_UP + ROUNDS):
        first = turn % len(peers)
        for peer in peers[first:] + peers[:first]:
            layer.reset()
            start = time.perf_counter()
            y = peer.forward(layer)
            middle = time.perf_counter()
            peer.backward(layer, y)
            if turn >= WARM_UP:
                times[peer.name].append((middle - start, time.perf_counter() - middle))
            del y
    return {name: [statistics.median(each) for each in zip(*of_peer, strict=True)] for name, of_peer in times.items()}


def compare() -> list[dict[str, Any]]:
    """Measure all settings, one after the other."""
    found = []
    for threads in sorted({1, os.cpu_count() or 1}):
        for allocation in ALLOCATIONS:
            print(f"{threads} threads, {allocation} allocation", file=sys.stderr)
            command = [
                sys.executable,
                "-m",
                "bench.cpu.settings",
                "--threads",
                str(threads),
                "--allocation",
                allocation,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append({"threads": threads, "allocation": allocation, "rows": json.loads(done.stdout)})
    return found


def summary(found: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each setting and peer: median, smallest and largest ratio of forward and of backward."""
    lines = []
    for setting in found:
        for peer in OTHERS:
            rows = [row for row in setting["rows"] if row["peer"] == peer]
            spread = [
                f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
                for values in ([row[what] for row in rows] for what in ("forward", "backward") if rows)
            ]
            if rows:  # Transformers may be missing
                lines.append([str(setting["threads"]), setting["allocation"], peer, *spread])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu.settings", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="every layer's figures")
    parser.add_argument("--threads", type=int, help="this setting alone, as JSON")
    parser.add_argument("--allocation", choices=ALLOCATIONS, default="default", help="with --threads")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
        if arguments.allocation == "kept":
            recording.keep_freed_memory()
        print(json.dumps(measure()))
        return
    found = compare()
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for line in summary(found):
            print("{:>2} threads, {:8} {:26} forward {:22} backward {}".format(*line[:1], line[1] + ",", *line[2:]))


if __name__ == "__main__":
    main()
