"""`torch.distributed.pipelining` over gloo: numbers against float64, with whole and with split backwards."""

from support.grids import is_quick
from support.pipelining_cells import ONE, SCHEDULES
from support.systems import MODES, SYSTEMS
from support.world import launch

# The stages in which a whole backward comes right before half of one, of the weights.
MIXED = {
    "InterleavedZeroBubble after Interleaved1F1B": {1, 2, 3},
    "ZBVZeroBubble, adjacent halves merged": {1, 2},
    "DualPipeV": {1, 2},
}


def test_losses_gradients_and_two_steps_in_every_cell(tmp_path):
    """What a cell is stands in `support/pipelining_cells.py`."""
    failures, orders = {}, {schedule: {} for schedule in SCHEDULES}
    for rank, (names, wrong, of_rank) in enumerate(launch("support.pipelining_cells:cells", 2, tmp_path, is_quick())):
        assert len(names) == len(set(names)) == (9 if is_quick() else 51)
        failures |= {f"rank {rank}, {name}": messages for name, messages in wrong.items()}
        for schedule, stages in of_rank.items():
            orders[schedule] |= stages
    assert failures == {}
    (row,) = [system for system in SYSTEMS if "torch.distributed.pipelining" in system.name]
    assert {row.answer(mode) for mode in MODES} == {"right"}  # as the document says
    noted = {schedule for schedule, stages in orders.items() if stages}  # of a mode whose "W" is a backward
    assert noted == set(SCHEDULES) or is_quick()
    split = {schedule for schedule, stages in orders.items() if any("W" in ran for ran in stages.values())}
    assert split == {schedule for schedule in noted if SCHEDULES[schedule][0] is not ONE}
    mixed = {schedule: {int(i) for i, ran in stages.items() if "BW" in ran} for schedule, stages in orders.items()}
    assert {schedule: stages for schedule, stages in mixed.items() if stages} == {
        schedule: stages for schedule, stages in MIXED.items() if schedule in noted
    }
