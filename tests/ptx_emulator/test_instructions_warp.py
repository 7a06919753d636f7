"""Instructions of all lanes of a warp together; `width` and `delta` are those of CUDA's `__shfl_sync`."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import lanes

LANES = np.arange(32)
VALUES = (LANES * 37 % 101 + 1000).astype(np.uint32)
FULL = 0xFFFFFFFF
# Even lanes branch away from the odd ones.
HALF = """
    and.b32 t, %lane, 1;
    setp.ne.u32 p, t, 0;
    @p bra ODD;
    {}
    ODD:"""


def from_lane(mode, delta, width):
    """The lane that each reads, and whether that is inside its segment."""
    segment, at = LANES - LANES % width, LANES % width
    if mode == "up":
        inside, other = at - delta >= 0, LANES - delta
    elif mode == "down":
        inside, other = at + delta < width, LANES + delta
    elif mode == "idx":
        inside, other = np.full(32, True), segment + delta % width
    else:  # a lane of an earlier segment can be read, of a later one not
        other = LANES ^ delta
        inside = other < segment + width
    return np.where(inside, other, LANES), inside


@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("delta", [0, 1, 3, 7, 16, 31])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl_stays_in_its_segment(mode, delta, width):
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    other, inside = from_lane(mode, delta, width)
    code = f"shfl.sync.{mode}.b32 d|p, a, {delta}, {clamp}, {FULL}; "
    np.testing.assert_array_equal(lanes(code, "u32 u32", VALUES), VALUES[other])
    np.testing.assert_array_equal(lanes(code + "selp.b32 d, 1, 0, p;", "u32 u32", VALUES), inside)


def test_shfl_takes_five_bits_of_a_lane():
    assert (lanes(f"shfl.sync.idx.b32 d, a, 37, 31, {FULL};", "u32 u32", VALUES) == VALUES[5]).all()


def test_shfl_beyond_the_clamp_gives_the_own_value():
    code = f"shfl.sync.idx.b32 d|p, a, 20, 15, {FULL}; @p mov.b32 d, 0;"
    np.testing.assert_array_equal(lanes(code, "u32 u32", VALUES), VALUES)


def test_shfl_reads_a_lane_of_each_lanes_own():
    code = f"shfl.sync.idx.b32 d, a, b, 31, {FULL};"
    other = (LANES * 7 + 3) % 32
    np.testing.assert_array_equal(lanes(code, "u32 u32 u32", VALUES, other), VALUES[other])


def test_part_of_a_warp_shuffles_among_itself():
    got = lanes(HALF.format("shfl.sync.bfly.b32 d, a, 2, 31, 0x55555555;"), "u32 u32", VALUES)
    np.testing.assert_array_equal(got, np.where(LANES % 2, 0, VALUES[LANES ^ 2]))


def test_a_lane_that_takes_no_part_cannot_be_read():
    with pytest.raises(EmulationError, match="shfl reads lane 1, which does not take part"):
        lanes(HALF.format("shfl.sync.bfly.b32 d, a, 1, 31, 0x55555555;"), "u32 u32", VALUES)


def test_lanes_that_are_named_and_never_come_are_an_error():
    both = f"shfl.sync.bfly.b32 d, a, 1, 31, {FULL};"
    code = f"setp.gt.u32 p, %lane, 15; @p bra OTHER; {both} bra.uni END; OTHER: {both} END:"
    with pytest.raises(EmulationError, match="wait for each other at different places"):
        lanes(code, "u32 u32", VALUES)


@pytest.mark.parametrize("negated", ["", "!"])
@pytest.mark.parametrize("least", [0, 3, 32])
def test_votes(least, negated):
    chosen = (least <= LANES) != bool(negated)
    ballot = int(sum(1 << int(i) for i in LANES[chosen]))
    code = f"setp.ge.u32 p, %lane, {least}; vote.sync.{{}} {{}}, {negated}p, {FULL};"
    as_number = " selp.b32 d, 1, 0, q;"
    assert set(lanes(code.format("ballot.b32", "d"), "u32 u32", VALUES).tolist()) == {ballot}
    for mode, expected in (("any", chosen.any()), ("all", chosen.all()), ("uni", chosen.all() or not chosen.any())):
        got = lanes(code.format(f"{mode}.pred", "q") + as_number, "u32 u32", VALUES)
        assert set(got.tolist()) == {int(expected)}


def test_a_vote_counts_participating_lanes():
    code = HALF.format("setp.gt.u32 p, %lane, 3; vote.sync.ballot.b32 d, p, 0x55555555;")
    np.testing.assert_array_equal(lanes(code, "u32 u32", VALUES), np.where(LANES % 2, 0, 0x55555550))
    code = HALF.format("activemask.b32 d;")
    np.testing.assert_array_equal(lanes(code, "u32 u32", VALUES), np.where(LANES % 2, 0, 0x55555555))


@pytest.mark.parametrize("bits", [32, 64])
def test_match_finds_equals(bits):
    a = (LANES % 3).astype(np.uint64) << np.uint64(bits - 8)
    kinds = f"u32 u{bits}"
    expected = [sum(1 << int(j) for j in LANES if j % 3 == i % 3) for i in LANES]
    assert lanes(f"match.any.sync.b{bits} d, a, {FULL};", kinds, a).tolist() == expected
    # All of them or none.
    code = f"match.all.sync.b{bits} d|p, a, {FULL}; @p add.u32 d, d, 2;"
    assert set(lanes(code, kinds, a).tolist()) == {0}
    assert set(lanes(code, kinds, a[:1]).tolist()) == {1}  # the mask of all, and 2 more


REDUCTIONS = {
    "add.u32": lambda a: a.sum(dtype=np.uint32),
    "add.s32": lambda a: a.sum(dtype=np.uint32),
    "min.u32": np.min,
    "max.u32": np.max,
    "min.s32": lambda a: a.view(np.int32).min().view(np.uint32),
    "max.s32": lambda a: a.view(np.int32).max().view(np.uint32),
    "and.b32": np.bitwise_and.reduce,
    "or.b32": np.bitwise_or.reduce,
    "xor.b32": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_redux(name):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2**32, 32, np.uint32) | np.uint32(0x1000)
    assert set(lanes(f"redux.sync.{name} d, a, {FULL};", "u32 u32", a).tolist()) == {int(REDUCTIONS[name](a))}
    some = int(REDUCTIONS[name](a[::2]))
    got = lanes(HALF.format(f"redux.sync.{name} d, a, 0x55555555;"), "u32 u32", a)
    assert got.tolist() == [0 if i % 2 else some for i in LANES]


@pytest.mark.parametrize(
    ("name", "expected"), [("min", -3), ("max", 7), ("min.NaN", np.nan), ("max.NaN", np.nan)], ids=lambda x: str(x)
)
def test_redux_of_fp32(name, expected):
    a = np.array([7, np.nan, -3, *[0.5] * 29], np.float32)
    got = lanes(f"redux.sync.{name}.f32 d, a, {FULL};", "f32 f32", a, target="sm_100")
    np.testing.assert_array_equal(got, np.full(32, expected, np.float32))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("max.abs", 7), ("min.abs", 0.5), ("max.abs.NaN", np.nan), ("min.abs.NaN", np.nan)],
    ids=lambda x: str(x),
)
def test_redux_of_absolute_values(name, expected):
    a = np.array([3, np.nan, -7, *[-0.5] * 29], np.float32)
    got = lanes(f"redux.sync.{name}.f32 d, a, {FULL};", "f32 f32", a, target="sm_100")
    np.testing.assert_array_equal(got, np.full(32, expected, np.float32))


def test_one_lane_alone_gives_its_absolute_value():
    a = np.full(32, -3, np.float32)
    got = lanes("setp.eq.u32 p, %lane, 5; @p redux.sync.max.abs.f32 d, a, 32;", "f32 f32", a, target="sm_100")
    assert got.tolist() == [3.0 if lane == 5 else 0.0 for lane in LANES]


def test_one_lane_is_elected():
    code = f"elect.sync t|p, {FULL}; selp.b32 d, 1, 0, p; shl.b32 t, t, 8; or.b32 d, d, t;"
    got = lanes(code, "u32 u32", VALUES)
    assert (got & 1).sum() == 1
    assert set((got >> 8).tolist()) == {int(np.flatnonzero(got & 1)[0])}  # all know which


def test_special_registers_know_the_lane():
    for name, expected in (("lt", (1 << LANES) - 1), ("le", (2 << LANES) - 1), ("eq", 1 << LANES)):
        np.testing.assert_array_equal(lanes(f"mov.u32 d, %lanemask_{name};", "u32 u32", VALUES), expected)
    np.testing.assert_array_equal(lanes("mov.u32 d, %laneid;", "u32 u32", VALUES), LANES)
