"""Distributed autograd, FAST mode, between two processes (`distributed_autograd.py` says what is checked)."""

import pytest
from support.systems import MODES, SYSTEMS
from support.world import launch


@pytest.mark.slow
def test_gradients_are_in_their_context_and_nowhere_else(tmp_path):
    (contexts, failures), (_, failures_of_the_other) = launch(
        "integrations.distributed_autograd:run", 2, tmp_path, str(tmp_path / "rpc")
    )
    assert contexts == 2 * 2 * len(MODES) * 2  # two at once, local and remote, packed and not
    assert failures == failures_of_the_other == {}
    (row,) = [system for system in SYSTEMS if "distributed.autograd" in system.name]
    assert all(row.answer(mode) == "right" for mode in MODES)
