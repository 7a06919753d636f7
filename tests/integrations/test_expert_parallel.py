"""The example of expert parallelism, also as a user starts it."""

import json

import pytest
import torch
from support.two_ranks import by_torchrun, in_forked_processes


@pytest.mark.slow
@pytest.mark.parametrize("start", [in_forked_processes, pytest.param(by_torchrun, marks=pytest.mark.exhaustive)])
def test_the_example_equals_one_process(start, tmp_path):
    """192 experts, so that some get no tokens; differences are of gradients, relative to the largest of each."""
    steps, out = 5, tmp_path / "results.json"
    arguments = ["--steps", str(steps), "--experts", "192", "--json", str(out)]
    assert "| fc1 |" in start("expert_parallel.py", arguments, tmp_path)
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
