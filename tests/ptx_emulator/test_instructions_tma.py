"""TMA: boxes of tensors to and from shared memory, with every swizzle, over every border."""

import math

import numpy as np
import pytest
from ptx_emulator import tma
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import brains, run_ptx
from ptx_emulator.tma import BOX, COMMIT, FENCE, INIT, WAIT, WRITTEN


def loaded(array, box, at, swizzle=0, fill=0):
    """The bytes of shared memory after a load."""
    out = np.zeros(math.prod(box) * array.itemsize, np.uint8)
    body = INIT + tma.load(at, out.size) + WAIT + tma.out_of_shared(out.size)
    run_ptx(body, tma.map_of(array, box, swizzle, fill), out, array, shared=BOX + out.size)
    return out


def stored(array, values, at, swizzle=0, reduction="", element_type=None):
    """The array after values were stored from shared memory."""
    data = tma.swizzled(values.view(np.uint8).reshape(-1, values.shape[-1] * values.itemsize), swizzle)
    after = array.copy()
    tensor = tma.map_of(after, values.shape, swizzle, element_type=element_type)
    body = f"{INIT} {tma.into_shared(data.size)} {FENCE} bar.sync 0; {tma.store(at, reduction)} {COMMIT} {WRITTEN}"
    run_ptx(body, tensor, data, after, shared=BOX + data.size)
    return after


RNG = np.random.default_rng(0)
MATRIX = RNG.integers(0, 2**16, (40, 64), np.uint16)
# Inside, over each border, beyond all of them.
PLACES = [(0, 0), (3, 8), (30, 0), (-5, 0), (0, 40), (0, -8), (-3, -16), (38, 60), (40, 0), (0, 64), (-16, 0)]


@pytest.mark.parametrize("at", PLACES, ids=lambda at: f"{at[0]}_{at[1]}")
@pytest.mark.parametrize("swizzle", range(4))
def test_loads(swizzle, at):
    box = (16, (tma.WIDTHS[swizzle] or 32) // 2)
    expected = tma.swizzled(tma.box_of(MATRIX, box, at).view(np.uint8), swizzle)
    np.testing.assert_array_equal(loaded(MATRIX, box, at, swizzle), expected)


@pytest.mark.parametrize("at", PLACES, ids=lambda at: f"{at[0]}_{at[1]}")
@pytest.mark.parametrize("swizzle", range(4))
def test_stores_leave_everything_outside(swizzle, at):
    box = (16, (tma.WIDTHS[swizzle] or 32) // 2)
    values = RNG.integers(0, 2**16, box, np.uint16)
    expected = MATRIX.copy()
    for r in range(box[0]):
        for c in range(box[1]):
            if 0 <= at[0] + r < 40 and 0 <= at[1] + c < 64:
                expected[at[0] + r, at[1] + c] = values[r, c]
    np.testing.assert_array_equal(stored(MATRIX, values, at, swizzle), expected)


@pytest.mark.parametrize("rank", range(1, 6))
def test_ranks(rank):
    shape, box = (3, 4, 5, 6, 24)[-rank:], (2, 2, 3, 2, 8)[-rank:]
    at = (-1, 3, 1, 5, 20)[-rank:]
    array = RNG.integers(1, 2**31, shape, np.int32)
    np.testing.assert_array_equal(loaded(array, box, at).view(np.int32), tma.box_of(array, box, at).ravel())
    values = RNG.integers(1, 2**31, box, np.int32)
    inside = tma.box_of(np.ones(shape, np.int32), box, at)
    after = stored(array, values, at)
    np.testing.assert_array_equal(tma.box_of(after, box, at), values * inside)
    assert (after != array).sum() == inside.sum()


# Rows anywhere, repeated, and outside of the tensor, which are zeros.
GATHERED = [7, 0, 39, 7, -1, 12, 40, 38, 1, 1, 1, 2, 2**31 - 1, 20, -(2**31), 5]


@pytest.mark.parametrize("column", [0, 24, 48, 64, -8])
@pytest.mark.parametrize("swizzle", range(4))
def test_rows_that_are_gathered(swizzle, column):
    box = (1, (tma.WIDTHS[swizzle] or 32) // 2)
    rows = [tma.box_of(MATRIX, box, (row, column)) for row in GATHERED]
    expected = tma.swizzled(np.concatenate(rows).view(np.uint8), swizzle)
    out = np.zeros(expected.size, np.uint8)
    body = INIT + tma.gather(GATHERED, column, out.size) + WAIT + tma.out_of_shared(out.size)
    run_ptx(body, tma.map_of(MATRIX, box, swizzle), out, MATRIX, shared=BOX + out.size)
    np.testing.assert_array_equal(out, expected)


def test_rows_that_are_gathered_come_one_by_one():
    """The box of their map has one row, and no other instruction takes four rows anywhere."""
    out = np.zeros(256, np.uint8)
    with pytest.raises(EmulationError, match="box has more than one row"):
        run_ptx(INIT + tma.gather([0, 1, 2, 3], 0, 256) + WAIT, tma.map_of(MATRIX, (2, 32)), out, MATRIX, shared=2048)
    for wrong, said in (
        (tma.gather([0, 1, 2, 3], 0, 256).replace(", 3}", "}"), "TMA coordinates"),
        (tma.gather([0, 1, 2, 3], 0, 256).replace("2d", "3d"), "TMA rank"),
        (tma.store((0, 0)).replace(".global.shared", ".tile::scatter4.global.shared"), "TMA mode"),
    ):
        with pytest.raises(EmulationError, match=said):
            run_ptx(INIT + wrong, tma.map_of(MATRIX, (1, 32)), out, MATRIX, shared=2048)


def test_rows_may_be_apart():
    whole, out = RNG.integers(0, 2**16, (8, 64), np.uint16), np.zeros(128, np.uint8)
    part = whole[1:7:2, 16:40]
    body = INIT + tma.load((0, 16), 128) + WAIT + tma.out_of_shared(128)
    run_ptx(body, tma.map_of(part, (4, 16)), out, whole, shared=BOX + 128)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(4, 16), tma.box_of(part, (4, 16), (0, 16)))


def test_what_is_outside_may_be_nan():
    array = np.ones((4, 16), np.float16)
    got = loaded(array, (4, 16), (2, 8), fill=1).view(np.float16)
    np.testing.assert_array_equal(got, tma.box_of(array, (4, 16), (2, 8), np.nan).ravel())


def test_bytes_outside_count_as_arrived():
    """The whole box counts, even if all of it is outside."""
    assert not loaded(MATRIX, (16, 16), (1000, 1000)).any()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16])
def test_reductions_add(dtype):
    array = RNG.integers(0, 50, (20, 16)).astype(dtype)
    values = RNG.integers(0, 50, (8, 16)).astype(dtype)
    expected = array.copy()
    expected[15:20] += values[:5]
    np.testing.assert_array_equal(stored(array, values, (15, 0), reduction=".add.tile"), expected)


def test_reductions_add_bf16():
    array, values = (brains(RNG.integers(0, 50, 128)).reshape(8, 16) for _ in range(2))
    after = stored(array, values, (0, 0), reduction=".add.tile", element_type=tma.BFLOAT16)
    as_float = [(x.astype(np.uint32) << 16).view(np.float32) for x in (array, values, after)]
    np.testing.assert_array_equal(as_float[2], as_float[0] + as_float[1])
