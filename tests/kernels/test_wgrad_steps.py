"""The order of experts and the steps over segments that wgrad plans, against plain Python."""

import pytest
import torch
from cases.experts import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmlp.kernels.launching.run import Launcher
from fusedmlp.kernels.operands.expert_tensors import device_table
from fusedmlp.kernels.wgrad import steps

loads = st.lists(st.lists(st.integers(0, 5), min_size=20, max_size=20), min_size=1, max_size=3)


def offsets_of(counts):
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()


def planned(segments, block):
    offsets = [offsets_of(counts) for counts in segments]
    num_experts = len(segments[0])
    if len(segments) == 1:
        return Launcher(steps.plan_steps)(offsets[0], num_experts)
    addresses = (*(t.data_ptr() for t in offsets), *[0] * 4 * len(offsets))
    table = device_table(addresses, offsets[0].device)
    return Launcher(steps.plan_steps)(offsets[0], num_experts, table, len(offsets), sum(map(sum, segments)), block)


def check(segments, block):
    plan, E = planned(segments, block), len(segments[0])
    rows = [sum(counts) for counts in zip(*segments, strict=True)]
    order = sorted(range(E), key=lambda e: (-rows[e], e))
    assert plan.order.tolist() == [*order, sum(n > 0 for n in rows)]
    if len(segments) == 1:
        assert plan.steps is None
        return
    firsts, steps = plan.steps[: E + 1].tolist(), plan.steps[E + 1 :].tolist()
    for expert in range(E):
        expected = []
        for s, counts in enumerate(segments):
            first, end = sum(counts[:expert]), sum(counts[: expert + 1])
            expected += [(s, row, end - row) for row in range(first, end, block)]
        begin, end = firsts[expert : expert + 2]
        got = [tuple(steps[3 * i : 3 * i + 3]) for i in range(begin, end)]
        assert got == (expected or [(0, sum(segments[0][:expert]), 0)])
    assert 3 * firsts[E] <= len(steps)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(loads, st.integers(1, 20), st.integers(1, 4))
def test_rows_of_several_segments(counts_of_segments, num_experts, block):
    check([counts[:num_experts] for counts in counts_of_segments], block)


@pytest.mark.parametrize("block", [1, 2, 64])
def test_more_steps_than_are_written_at_once(block):
    check([[3, 0, 300], [0, 0, 129], [500, 0, 1]], block)


def test_no_rows_at_all():
    check([[0, 0], [0, 0]], 16)


def test_the_table_is_never_longer_than_thought():
    check([[1] * 9, [1] * 9, [17] * 9], 16)  # a step for every row and one more
