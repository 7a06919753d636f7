"""The example of expert parallelism, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel.py"


def test_the_example_equals_one_process(tmp_path):
    """So many experts that some get no tokens; differences are of gradients, relative to the largest of each."""
    steps, out = 5, tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        [*command, "--steps", str(steps), "--experts", "192", "--json", str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| fc1 |" in done.stdout
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
