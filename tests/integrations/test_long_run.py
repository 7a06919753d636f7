"""500 steps of the demo's model under DDP on two ranks; see `long_run.py`."""

import pytest
from support.world import launch

STEPS, KILL_AT, UNTIL = 500, 233, 330
pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of rank 0. The ranks assert that gradients at the same weights agree up to rounding all along."""
    return launch("integrations.long_run:compare", 2, tmp_path_factory.mktemp("runs"), STEPS)[0]


def test_losses_of_fused_and_plain_training_agree(runs):
    fused, plain, control = runs["fused"]["losses"], runs["plain"], runs["control"]
    assert len(fused) == STEPS
    assert sum(fused[-20:]) / 20 < fused[0] - 2
    difference, drift = ([abs(a - b) for a, b in zip(run, plain, strict=True)] for run in (fused, control))
    hundreds = [max(difference[i : i + 100]) for i in range(0, STEPS, 100)]
    print(f"largest differences in nats per byte, by hundreds of steps: {hundreds}; of the control: {max(drift):.2g}")
    assert max(difference[:3]) <= 4 * 2**-23 * plain[0]  # rounding; a lost gradient shows by then
    # Two drifts of one kind differ by a random factor. The loss is 5.5 at first; a step has 64 bytes.
    assert max(difference) <= 4 * max(drift) < 1
    assert runs["fused"]["empty"] > STEPS  # experts without tokens


def test_memory_is_flat(runs):
    """One gradient of the smallest expert weight, kept in each step, would be 13 MiB."""
    (early_rss, early_tensors), (late_rss, late_tensors) = runs["fused"]["memory"]
    assert late_tensors == early_tensors
    assert late_rss - early_rss < 4 * 2**20


def test_killed_in_the_middle_of_a_step_and_resumed(runs, tmp_path):
    """SIGKILL, then a new world from the last checkpoint: the same losses, bit for bit."""
    with pytest.raises(AssertionError):
        launch("integrations.long_run:killed", 2, tmp_path, STEPS, str(tmp_path), KILL_AT)
    for start, losses in launch("integrations.long_run:resumed", 2, tmp_path, STEPS, str(tmp_path), UNTIL):
        assert start == KILL_AT // 100 * 100
        assert losses == runs["fused"]["losses"][start:UNTIL]
