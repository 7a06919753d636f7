"""`torch.distributed.pipelining` over gloo: numbers against float64, with whole and with split backwards."""

import re

import pytest
from integrations.pipelining_cells import ONE, SCHEDULES
from support.grids import only_pairs
from support.systems import MODES, SYSTEMS
from support.two_ranks import by_torchrun, in_forked_processes
from support.world import launch

# Stages in which a whole backward ("B") comes right before a half of weights ("W").
MIXED = {
    "InterleavedZeroBubble after Interleaved1F1B": {1, 2, 3},
    "ZBVZeroBubble, adjacent halves merged": {1, 2},
    "DualPipeV": {1, 2},
}


@pytest.mark.slow
def test_losses_gradients_and_two_steps_in_every_cell(tmp_path):
    """`pipelining_cells.py` defines the cells."""
    failures, orders = {}, {schedule: {} for schedule in SCHEDULES}
    for rank, (names, wrong, of_rank) in enumerate(
        launch("integrations.pipelining_cells:cells", 2, tmp_path, only_pairs())
    ):
        assert len(names) == len(set(names)) == (11 if only_pairs() else 61)
        failures |= {f"rank {rank}, {name}": messages for name, messages in wrong.items()}
        for schedule, stages in of_rank.items():
            orders[schedule] |= stages
    assert failures == {}
    (row,) = [system for system in SYSTEMS if "torch.distributed.pipelining" in system.name]
    assert {row.answer(mode) for mode in MODES} == {"right"}  # as the document says
    noted = {schedule for schedule, stages in orders.items() if stages}  # with a cell without dw_builder
    assert noted == set(SCHEDULES) or only_pairs()
    split = {schedule for schedule, stages in orders.items() if any("W" in ran for ran in stages.values())}
    assert split == {schedule for schedule in noted if SCHEDULES[schedule][0] is not ONE}
    mixed = {schedule: {int(i) for i, ran in stages.items() if "BW" in ran} for schedule, stages in orders.items()}
    assert {schedule: stages for schedule, stages in mixed.items() if stages} == {
        schedule: stages for schedule, stages in MIXED.items() if schedule in noted
    }


@pytest.mark.slow
@pytest.mark.parametrize("start", [in_forked_processes, pytest.param(by_torchrun, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", pytest.param("DualPipeV", marks=pytest.mark.exhaustive)])
def test_the_example_trains_as_plain_stages_do(schedule, start, tmp_path):
    picture = tmp_path / "schedule.svg"
    printed = start("zero_bubble.py", ["--schedule", schedule, "--steps", "3", "--picture", str(picture)], tmp_path)
    (apart,) = re.findall(r"differ by at most (\S+) of their norm", printed)
    assert 0 < float(apart) < 1e-5
    for step in ("first", "last"):
        plain, fused = map(float, re.search(rf"loss, {step} step \| (\S+) \| (\S+) \|", printed).groups())
        assert plain == pytest.approx(fused, rel=1e-5)
    shares = [int(share) for share in re.findall(r"idle (\d+)%", printed)]
    assert shares
    assert shares[0] <= 5
    assert "<svg" in picture.read_text()
