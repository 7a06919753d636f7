"""The wgrad kernel by itself: every path, main_grad in odd places and layouts, several segments, no rows."""

import dataclasses

import pytest
import torch
from cases import tiles
from cases.experts import DEVICE, INTERPRETED
from cases.factory import wgrad_segment
from cases.wgrad import PLACES, UNTOUCHED, check, check_bias, gathered, main_grad, path_of, run, shifted

from fusedmlp.kernels.launching.cost import Cost
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.routing import plan
from fusedmlp.kernels.tiles import table
from fusedmlp.kernels.tiles.table import Tile
from fusedmlp.kernels.wgrad import launch as wgrad_launch
from fusedmlp.kernels.wgrad import segments
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_

RAGGED = (17, 0, 1, 40)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_main_grad_in_an_owners_buffer(place, accumulate, dtype, grad_dtype):
    one = wgrad_segment(RAGGED, 48, 80, dtype, device=DEVICE)
    flat, experts = main_grad(place, 4, 48, 80, grad_dtype)
    if not accumulate:
        for expert in experts:
            expert.fill_(float("nan"))
    path = run(experts, [one], accumulate, packed="packed" in place)
    assert path == path_of(PLACES[place], dtype, (48, 80))
    check(experts, [one], UNTOUCHED if accumulate else 0.0)
    for expert in experts:
        expert.fill_(UNTOUCHED)
    assert (flat == UNTOUCHED).all()  # nothing around it was written


def test_main_grad_of_16_bits_is_overwritten_by_threads():
    test_main_grad_in_an_owners_buffer("misaligned", False, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("counts", [RAGGED, (0, 0, 0), (1, 1, 1), (0, 70)])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (37, 65), (64, 32), (8, 100)])
@pytest.mark.parametrize("accumulate", [True, False])
def test_sizes_and_loads(counts, N, K, accumulate):
    one = wgrad_segment(counts, N, K, torch.bfloat16, device=DEVICE)
    _, experts = main_grad("packed", len(counts), N, K)
    path = run(experts, [one], accumulate, packed=True)
    assert path == path_of("tma" if (N, K) == (64, 32) else "unaligned", torch.bfloat16)
    check(experts, [one], UNTOUCHED if accumulate else 0.0)


@pytest.mark.parametrize("place", ["packed", "misaligned"])
def test_a_neighbours_rows_do_not_leak(place):
    one = wgrad_segment((5, 6, 7), device=DEVICE)
    one.dy[5:11], one.x[5:11] = float("nan"), float("nan")
    _, experts = main_grad(place, 3, 40, 72)
    run(experts, [one], accumulate=True)
    assert experts[1].isnan().all()
    one.dy[5:11], one.x[5:11] = 0.0, 0.0
    experts[1].fill_(UNTOUCHED)
    check(experts, [one], UNTOUCHED)


@pytest.mark.parametrize("place", ["packed", "misaligned", "scattered"])
@pytest.mark.parametrize("with_db", [True, False])
def test_experts_without_rows(place, with_db):
    one = wgrad_segment((0, 5, 0), device=DEVICE)
    _, experts = main_grad(place, 3, 40, 72)
    db = torch.full((3, 40), float("nan"), device=DEVICE)
    for accumulate in (False, True):
        run(experts, [one], accumulate, db=db if with_db else None)
        if not accumulate:
            assert experts[0].count_nonzero() == experts[2].count_nonzero() == 0
            experts[0].fill_(-0.0)
    assert torch.signbit(experts[0]).all()  # not even zero was added
    if with_db:
        assert torch.equal(db[[0, 2]], torch.zeros(2, 40, device=DEVICE))


@pytest.mark.parametrize("place", ["packed", "packed in_out", "reversed", "misaligned", "scattered"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_segments_are_summed_before_one_update(place, accumulate, shift):
    segs = [wgrad_segment(c, seed=i, device=DEVICE) for i, c in enumerate([(3, 0, 20), (0, 0, 7), (40, 0, 1)])]
    if shift:  # a micro-batch at a 4-byte address, as a view of a larger tensor has it
        segs[1] = shifted(segs[1])
    _, experts = main_grad(place, 3, 40, 72)
    path = run(experts, segs, accumulate)
    assert path == path_of("unaligned" if shift else PLACES[place], torch.float32)
    check(experts, segs, UNTOUCHED if accumulate else 0.0)
    if accumulate:
        assert (experts[1] == UNTOUCHED).all()  # no rows in any segment: not a bit may change


@pytest.mark.parametrize("place", ["packed", "packed in_out"])
@pytest.mark.parametrize("operand", ["dy", "x"])
@pytest.mark.parametrize("counts", [[(1, 0), (3, 4)], [(0, 1), (1, 0), (0, 1)]])
def test_a_segment_of_one_row_that_was_cut_from_wider_ones(counts, operand, place):
    segs = [wgrad_segment(c, 48, 80, seed=i, padding=0, device=DEVICE) for i, c in enumerate(counts)]
    like = getattr(segs[0], operand)
    rows, columns = sum(map(sum, counts)), like.shape[1]
    flat = like.new_full((4 * columns + rows * columns,), float("nan"))  # the lowest address is that of the single row
    moved, start = [], 0
    for one in segs:
        own = getattr(one, operand)
        wide = 2 * columns if start == 0 else columns
        view = flat.as_strided(own.shape, (wide, 1), start)
        moved.append(dataclasses.replace(one, **{operand: view.copy_(own)}))
        start += max(own.shape[0], 2) * columns
        assert view.is_contiguous()
    _, experts = main_grad(place, 2, 48, 80)
    assert run(experts, moved, accumulate=True) == path_of("tma", torch.float32, (48, 80))
    check(experts, moved, UNTOUCHED)


def test_segments_out_of_a_descriptors_reach_go_by_pointer(monkeypatch):
    segs = [wgrad_segment((3, 4), 48, 80, seed=i, device=DEVICE) for i in range(2)]
    monkeypatch.setattr(segments, "MAX_COORDINATE", 1)
    _, experts = main_grad("packed", 2, 48, 80)
    assert run(experts, segs, accumulate=True) == "pointer"
    check(experts, segs, UNTOUCHED)


@pytest.mark.parametrize("place", ["packed", "packed in_out", "misaligned", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_scale", [True, False])
def test_bias_gradient(place, dtype, with_scale):
    one = wgrad_segment(RAGGED, dtype=dtype, device=DEVICE)
    scale = one.scale() if with_scale else None
    _, experts = main_grad(place or "packed", 4, 40, 72)
    db = torch.full((4, 40), float("nan"), device=DEVICE, dtype=dtype)
    if place is None:
        grouped_wgrad_(None, ExpertTensors.of([db], 1), [one.dy], [], [one.offsets], accumulate=False, scale_R=scale)
    else:
        run(experts, [one], accumulate=True, db=db, scale=scale)
        check(experts, [one], UNTOUCHED)
    check_bias(db, one, scale)


@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_path_and_every_run_give_the_same_bits(segmented, dtype):
    segs = [wgrad_segment((17, 0, 20), 48, 80, dtype, seed=i, device=DEVICE) for i in range(2 if segmented else 1)]

    def result(place):
        _, experts = main_grad(place, 3, 48, 80)
        assert run(experts, segs, accumulate=True) == path_of(PLACES[place], dtype, (48, 80))
        return torch.stack(experts)

    assert torch.equal(result("packed"), result("packed"))
    assert torch.equal(result("packed"), result("reversed"))
    if INTERPRETED:  # tiles of all paths take as many rows per step; on a GPU they need not
        assert torch.equal(result("packed"), result("misaligned"))
        assert torch.equal(result("packed"), result("scattered"))


@pytest.mark.parametrize("subtiles", [1, 2, 4])
@pytest.mark.parametrize("place", ["packed", "misaligned"])
def test_column_subtiles(subtiles, place):
    own = {}
    if INTERPRETED:
        tile = Tile(16, 32, 64, 1, 1, SUBTILES=subtiles, GROUP_M=3, PER_SM=1)
        own = {key: tile for key in table.TABLES["interpreter"] if key.kernel == "wgrad"}
    one = wgrad_segment(RAGGED, 72, 136, device=DEVICE)
    _, experts = main_grad(place, 4, 72, 136)
    with tiles.changed(lambda target: dataclasses.replace(target, tiles=target.tiles | own)):
        run(experts, [one], accumulate=True)
    check(experts, [one], UNTOUCHED)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("dealt", [True, False])
def test_each_tile_may_have_a_program_of_its_own(dealt, accumulate, monkeypatch):
    one = wgrad_segment(RAGGED, device=DEVICE)
    order = plan.Schedule(one.offsets, one.dy.shape[0]).order
    assert order[:5].tolist() == [3, 0, 2, 1, 3]  # the last 3: three have rows
    monkeypatch.setattr(wgrad_launch, "deals_out", lambda tiles, programs: dealt)
    _, experts = main_grad("packed", 4, 40, 72)
    db = torch.full((4, 40), torch.nan, device=DEVICE)
    run(experts, [one], accumulate, packed=True, order=order, db=db)
    check(experts, [one], UNTOUCHED if accumulate else 0)
    check_bias(db, one, None)


def test_a_segment_without_rows():
    segs = [wgrad_segment(c, seed=i, padding=0, device=DEVICE) for i, c in enumerate([(0, 0), (3, 20), (0, 0)])]
    _, experts = main_grad("packed", 2, 40, 72)
    assert run(experts, segs, accumulate=True) == path_of("tma", torch.float32)
    check(experts, segs, UNTOUCHED)


@pytest.mark.parametrize("name", ["dy", "x"])
@pytest.mark.parametrize("place", ["packed", "packed in_out", "misaligned", "scattered in_out"])
@pytest.mark.parametrize(
    ("dtype", "loads"),
    [
        (torch.bfloat16, [RAGGED]),
        (torch.float16, [(0, 0, 0), (1, 1, 1)]),
        (torch.float32, [(3, 0, 20), (0, 0, 7), (40, 0, 1)]),
    ],
    ids=str,
)
def test_rows_gathered_by_index(name, place, dtype, loads):
    segs = [wgrad_segment(counts, 48, 80, dtype, seed=i, device=DEVICE) for i, counts in enumerate(loads)]
    moved, row_ids = gathered(segs, name)
    _, experts = main_grad(place, len(loads[0]), 48, 80)
    best = "gather" if PLACES[place] == "tma" else PLACES[place]
    assert run(experts, moved, True, **row_ids) == path_of(best, dtype, (48, 80))
    check(experts, segs, UNTOUCHED)


@pytest.mark.parametrize("name", ["dy", "x"])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (37, 65), (8, 100)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_gathered_rows_of_odd_sizes(name, N, K, index_dtype):
    one = wgrad_segment(RAGGED, N, K, torch.bfloat16, device=DEVICE)
    moved, row_ids = gathered([one], name, index_dtype)
    _, experts = main_grad("packed", 4, N, K)
    assert run(experts, moved, False, packed=True, **row_ids) == "unaligned"
    check(experts, [one], 0.0)


@pytest.mark.parametrize("place", ["packed", "packed in_out", "misaligned", None])
def test_bias_gradient_of_gathered_rows(place):
    one = wgrad_segment(RAGGED, 48, 80, device=DEVICE)
    scale = torch.rand(one.dy.shape[0], device=DEVICE) + 0.5
    got, want = torch.full((2, 4, 48), float("nan"), device=DEVICE)
    moved, row_ids = gathered([one], "dy")
    if place is None:
        db, offsets = ExpertTensors.of([got], 1), [one.offsets]
        grouped_wgrad_(None, db, [moved[0].dy], [], offsets, accumulate=False, scale_R=scale, **row_ids)
        grouped_wgrad_(None, ExpertTensors.of([want], 1), [one.dy], [], offsets, accumulate=False, scale_R=scale)
    else:
        run(main_grad(place, 4, 48, 80)[1], moved, True, db=got, scale=scale, **row_ids)
        run(main_grad(place, 4, 48, 80)[1], [one], True, db=want, scale=scale)
    torch.testing.assert_close(got, want)  # `want` is checked in test_bias_gradient


def test_elements_beyond_int32():
    """Strides fit 32 bits, offsets of rows and experts do not. Rows of all experts interleave, 32 elements apart."""
    one = wgrad_segment((5, 0, 6), 9, 32, torch.bfloat16, device=DEVICE)
    flat = torch.empty(2**32 + 128, dtype=torch.bfloat16, device=DEVICE)  # all but a few pages stay unused
    dw = flat.as_strided((3, 9, 32), (2**30, 2**28 + 8, 1))
    dw.fill_(UNTOUCHED)
    assert run(list(dw), [one], accumulate=True) == "unaligned"
    check(list(dw), [one], UNTOUCHED)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("place", ["packed", "packed in_out", "misaligned"])
def test_least_traffic_is_reported(accumulate, place):
    segs = [wgrad_segment(c, dtype=torch.bfloat16, device=DEVICE) for c in [(3, 0, 20), (0, 0, 7)]]
    _, experts = main_grad(place, 3, 40, 72)
    operands = [[getattr(s, name) for s in segs] for name in ("dy", "x", "offsets")]
    with recording() as recorded:
        grouped_wgrad_(ExpertTensors.of(experts, 2), None, *operands, accumulate=accumulate)
    grad_bytes = 2 * 40 * 72 * 8 if accumulate else 3 * 40 * 72 * 4
    read = 30 * (40 + 72) * 2
    path = path_of(PLACES[place], torch.bfloat16)
    assert recorded[-1].path == path
    cost = recorded[-1].cost_of((3, 0, 27))
    assert cost == Cost("wgrad", 2 * 30 * 40 * 72, read + grad_bytes, grad_bytes)


def test_least_traffic_of_a_bias():
    one = wgrad_segment((3, 0, 20), dtype=torch.bfloat16, device=DEVICE)
    db = ExpertTensors.of([torch.empty(3, 40, dtype=torch.bfloat16, device=DEVICE)], 1)
    with recording() as recorded:
        grouped_wgrad_(None, db, [one.dy], [], [one.offsets], accumulate=False, scale_R=torch.ones(26, device=DEVICE))
    assert recorded[-1].path == "unaligned"
    assert recorded[-1].cost_of((3, 0, 20)) == Cost("wgrad", 2 * 23 * 40, 23 * 40 * 2 + 3 * 40 * 2 + 23 * 4)
