"""The device-built schedule against a plain Python one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmlp.kernels import configs, schedule
from fusedmlp.kernels.expert_tensors import device_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def expected_tiles(offsets, num_rows, block):
    tiles = []
    groups = [*zip(offsets, offsets[1:], strict=False), (offsets[-1], num_rows)]
    for group, (first, end) in enumerate(groups):
        tiles += [(group, row, end) for row in range(first, end, block)]
    return tiles


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=40), st.integers(0, 50), st.sampled_from([16, 64]))
def test_every_row_is_in_exactly_one_tile(counts, padding, block):
    num_rows = sum(counts) + padding
    if num_rows == 0:
        return
    offsets, valid = schedule.expert_offsets(torch.tensor(counts, device=DEVICE), num_rows)
    assert valid.item()
    assert offsets.tolist() == [sum(counts[:e]) for e in range(len(counts) + 1)]
    (owned, used, _), *tiles = schedule.tile_schedule(offsets, num_rows, block).tolist()
    expected = expected_tiles(offsets.tolist(), num_rows, block)
    assert [tuple(tile) for tile in tiles[:used]] == expected
    assert owned == sum(expert < len(counts) for expert, _, _ in expected)


def test_the_worst_load_needs_exactly_the_bound():
    counts, block = [1, 1, 1, 33], 16  # three short tiles, then three for 33 rows
    offsets, _ = schedule.expert_offsets(torch.tensor(counts, device=DEVICE), sum(counts))
    tiles = schedule.tile_schedule(offsets, sum(counts), block)
    assert tiles.shape[0] >= 1 + 6
    assert tiles[0, :2].tolist() == [6, 6]
    assert schedule.max_tiles(36, 3, 16) == 6  # four groups with the padding: 3 + ceil(33 / 16)


@pytest.mark.parametrize(
    ("counts", "num_rows", "offsets"),
    [([3, 9], 10, [0, 3, 10]), ([-2, 4], 10, [0, 0, 4]), ([20, 1, 1], 5, [0, 5, 5, 5])],
)
def test_wrong_counts_are_reported_and_stay_in_bounds(counts, num_rows, offsets):
    got, valid = schedule.expert_offsets(torch.tensor(counts, device=DEVICE), num_rows)
    assert not valid.item()
    assert got.tolist() == offsets


def test_counts_larger_than_int32_do_not_wrap():
    got, valid = schedule.expert_offsets(torch.tensor([2**31, 2**31, 2**33], device=DEVICE), 7)
    assert not valid.item()
    assert got.tolist() == [0, 7, 7, 7]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2, 8]))
def test_the_order_of_work_visits_every_tile_once_and_in_groups(num_m, num_n, group):
    order = [schedule.tile_at.fn(place, num_m, num_n, group) for place in range(num_m * num_n)]
    assert sorted(order) == [(m, n) for m in range(num_m) for n in range(num_n)]
    assert {m // group for m, _ in order[: group * num_n]} == {0}
    assert len({n for _, n in order[: min(group, num_m)]}) == 1  # neighbours share a weight tile


def test_tiles_are_built_once_for_each_size():
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE)
    tiles = schedule.Schedule(offsets, 9)
    assert tiles.tiles(16) is tiles.tiles(16)
    assert tiles.tiles(32) is not tiles.tiles(16)
    assert tiles.rows() == [3, 6]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 5), min_size=20, max_size=20), min_size=1, max_size=3), st.integers(1, 20))
def test_experts_with_most_rows_come_first(counts_of_segments, num_experts):
    segments = [counts[:num_experts] for counts in counts_of_segments]
    offsets = [torch.tensor([0, *counts], device=DEVICE).cumsum(0).int() for counts in segments]
    table = device_table(tuple(t.data_ptr() for t in offsets), offsets[0].device) if len(segments) > 1 else None
    rows = [sum(counts) for counts in zip(*segments, strict=True)]
    by_rows = sorted(range(num_experts), key=lambda e: (-rows[e], e))
    used = sum(n > 0 for n in rows)
    assert schedule.expert_order(offsets[0], table).tolist() == [*by_rows, used, 0]


@pytest.mark.parametrize(("num_n", "num_k", "group"), [(1, 1, 4), (5, 3, 2), (4, 7, 4), (3, 2, 16), (12, 8, 5)])
def test_every_tile_is_in_the_list_once(num_n, num_k, group):
    listed = [schedule.wgrad_tile.fn(i, num_n, num_k, group) for i in range(3 * num_n * num_k)]
    assert sorted(listed) == [(e, n, k) for e in range(3) for n in range(num_n) for k in range(num_k)]
    assert [e for e, _, _ in listed] == sorted(e for e, _, _ in listed)


def test_tiles_that_run_together_share_operands():
    num_n, num_k, processors = 32, 16, 132
    tile = configs.TABLES["sm_90"]["wgrad", "tma", 16]["long"]
    together = [schedule.wgrad_tile.fn(i, num_n, num_k, tile.GROUP_M) for i in range(processors)]
    rows, columns = {n for _, n, _ in together}, {k for _, _, k in together}
    loaded = len(rows) * tile.BLOCK_N + len(columns) * tile.BLOCK_K
    square = 2 * (processors * tile.BLOCK_N * tile.BLOCK_K) ** 0.5  # the least that so many tiles can need
    assert loaded <= 1.1 * square
