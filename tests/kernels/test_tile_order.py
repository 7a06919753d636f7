"""The order of tiles: each is visited once, and tiles that run together share operands."""

from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmlp.kernels.device import tile_order
from fusedmlp.kernels.tiles import table


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2, 8]))
def test_the_order_of_work_visits_every_tile_once_and_in_groups(num_m, num_n, group):
    order = [tile_order.tile_at.fn(i, num_m, num_n, group) for i in range(num_m * num_n)]
    assert sorted(order) == [(m, n) for m in range(num_m) for n in range(num_n)]
    assert {m // group for m, _ in order[: group * num_n]} == {0}
    assert len({n for _, n in order[: min(group, num_m)]}) == 1  # neighbours share a weight tile


@pytest.mark.parametrize(("num_n", "num_k", "group"), [(1, 1, 4), (5, 3, 2), (4, 7, 4), (3, 2, 16), (12, 8, 5)])
def test_every_tile_is_in_the_list_once(num_n, num_k, group):
    listed = [tile_order.wgrad_tile.fn(i, num_n, num_k, group) for i in range(3 * num_n * num_k)]
    assert sorted(listed) == [(e, n, k) for e in range(3) for n in range(num_n) for k in range(num_k)]
    assert [e for e, _, _ in listed] == sorted(e for e, _, _ in listed)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 300), st.integers(1, 40))
def test_a_list_is_dealt_out_once(length, programs):
    places = [
        [
            tile_order.tile_index_at.fn(turn, program, programs)
            for turn in range(tile_order.num_turns.fn(length, program, programs))
        ]
        for program in range(programs)
    ]
    assert sorted(chain(*places)) == list(range(length))
    for own in places:
        assert all(i + k + 1 == 2 * programs * (turn + 1) for turn, (i, k) in enumerate(pairwise(own)))


def test_tiles_that_run_together_share_operands():
    num_n, num_k, processors = 32, 16, 132
    tile = table.TABLES["sm_90"][table.Key("wgrad", "tma", "bf16", "long")]
    together = [tile_order.wgrad_tile.fn(i, num_n, num_k, tile.GROUP_M) for i in range(processors)]
    rows, columns = {n for _, n, _ in together}, {k for _, _, k in together}
    loaded = len(rows) * tile.BLOCK_N + len(columns) * tile.BLOCK_K
    square = 2 * (processors * tile.BLOCK_N * tile.BLOCK_K) ** 0.5  # the least that as many tiles can load
    assert loaded <= 1.1 * square
