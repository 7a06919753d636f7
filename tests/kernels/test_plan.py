"""Plans of loads, which the device makes, against plain Python."""

import pytest
import torch
from cases.experts import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmlp.kernels.launching.run import Launcher
from fusedmlp.kernels.routing import order, plan
from fusedmlp.kernels.tiles import select, table


def tiles_of(offsets, num_rows, block):
    groups = [*zip(offsets, offsets[1:], strict=False), (offsets[-1], num_rows)]
    return [(g, row, end) for g, (first, end) in enumerate(groups) for row in range(first, end, block)]


def order_of(rows):
    return sorted(range(len(rows)), key=lambda e: (-rows[e], e))


def table_of(schedule, block):
    """The table of tiles of `block` rows: in the plan or, if it has none, made by a launch."""
    num_rows, E, made = schedule.num_rows, schedule.num_experts, schedule.offsets
    blocks = table.row_blocks(select.architecture(made.device))
    if block not in blocks:
        blocks = (block,)
        made = Launcher(plan.plan_tables)(None, made, None, num_rows, E, blocks)
    return made[plan.size_of_plan(num_rows, E, blocks[: blocks.index(block)]) :]


def check(schedule, counts, num_rows):
    """Compare everything that a plan of these counts says."""
    E, offsets = len(counts), [sum(counts[:e]) for e in range(len(counts) + 1)]
    assert schedule.offsets[: E + 1].tolist() == offsets
    assert schedule.order[: E + 1].tolist() == [*order_of(counts), sum(n > 0 for n in counts)]
    blocks = table.row_blocks(select.architecture(torch.empty(0, device=DEVICE).device))
    for block in () if num_rows == 0 else (*blocks, 48):  # 48 is in no table
        found = table_of(schedule, block)
        expected = tiles_of(offsets, num_rows, block)
        owned = sum(expert < E for expert, _, _ in expected)
        assert found[:2].tolist() == [owned, len(expected)]
        listed = found[3 : 3 + 3 * len(expected)].view(-1, 3).tolist()
        assert [tuple(tile) for tile in listed] == expected
        assert len(expected) <= schedule.max_tiles(block)


loads = st.lists(st.integers(0, 70), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(loads, st.integers(0, 50))
def test_a_plan_of_counts(counts, padding):
    num_rows = sum(counts) + padding
    made, valid = plan.plan_of_counts(torch.tensor(counts, device=DEVICE), num_rows)
    assert valid.item()
    check(plan.Schedule(made, num_rows, len(counts)), counts, num_rows)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(loads, st.integers(0, 50))
def test_a_plan_of_first_rows(counts, padding):
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    check(plan.Schedule(offsets, sum(counts) + padding), counts, sum(counts) + padding)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(-1, 12), min_size=1, max_size=400), st.integers(1, 12))
def test_a_plan_of_routed_positions(ids, num_experts):
    ids = torch.tensor(ids)[:, None]
    routed = order.order_rows(ids.to(DEVICE), torch.rand(ids.shape, device=DEVICE), num_experts)
    counts = [int((ids == e).sum()) for e in range(num_experts)]
    check(plan.Schedule(routed.plan, len(ids), num_experts), counts, len(ids))


@pytest.mark.parametrize("num_experts", [1, 7, 8, 9, 300])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_numbers_of_experts_and_dtypes(num_experts, dtype):
    counts = torch.arange(num_experts) * 7 % 23
    made, _ = plan.plan_of_counts(counts.to(DEVICE, dtype), int(counts.sum()))
    check(plan.Schedule(made, int(counts.sum()), num_experts), counts.tolist(), int(counts.sum()))


def test_the_worst_load_needs_exactly_the_bound():
    counts = torch.tensor([1, 1, 1, 33], device=DEVICE)  # three short tiles, then three for 33 rows
    made, _ = plan.plan_of_counts(counts, 36)
    assert table_of(plan.Schedule(made, 36, 4), 16)[:2].tolist() == [6, 6]
    assert plan.max_tiles(36, 3, 16) == 6  # four groups with the padding: 3 + ceil(33 / 16)


@pytest.mark.parametrize(("num_rows", "most"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4)])
def test_few_rows_need_few_tiles(num_rows, most):
    assert plan.max_tiles(num_rows, 2, 2) == most


@pytest.mark.parametrize(
    ("counts", "num_rows", "offsets"),
    [([3, 9], 10, [0, 3, 10]), ([-2, 4], 10, [0, 0, 4]), ([20, 1, 1], 5, [0, 5, 5, 5])],
)
def test_wrong_counts_are_reported_and_stay_in_bounds(counts, num_rows, offsets):
    got, valid = plan.plan_of_counts(torch.tensor(counts, device=DEVICE), num_rows)
    assert not valid.item()
    assert got[: len(offsets)].tolist() == offsets


def test_counts_larger_than_int32_do_not_wrap():
    got, valid = plan.plan_of_counts(torch.tensor([2**31, 2**31, 2**33], device=DEVICE), 7)
    assert not valid.item()
    assert got[:4].tolist() == [0, 7, 7, 7]
