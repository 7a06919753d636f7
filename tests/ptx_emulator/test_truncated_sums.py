"""Sums that MMAs truncate as tensor cores do, if an order asks for it; every expected value is computed by hand."""

import dataclasses

import numpy as np
import pytest
from ptx_emulator.library import SUMS_OF_SM_90, EmulationError
from ptx_emulator.ptx import ORDERS, brains
from ptx_emulator.scaled import ScaledProduct
from ptx_emulator.test_instructions_mma import fragment_c, product
from ptx_emulator.test_instructions_tcgen05 import ROWS, Steps
from ptx_emulator.test_instructions_wgmma import COMMIT, FENCE, WAIT, Product

TRUNCATED = [dataclasses.replace(order, **SUMS_OF_SM_90) for order in ORDERS]
OF_BF16 = [
    # Terms keep multiples of 2^-25 beside a 1, and the sum multiples of 2^-23.
    ("four terms lose a third", 0, [(1, 1), *[(2**-12, 1.5 * 2**-13)] * 4], 1 + 2**-23),
    ("of either sign", 0, [(-1, 1), *[(2**-12, -1.5 * 2**-13)] * 4], -1 - 2**-23),
    ("three are less than the sum keeps", 0, [(1, 1), *[(2**-12, 1.5 * 2**-13)] * 3], 1),
    ("smaller ones are lost", 0, [(1, 1), *[(2**-13, 1.9375 * 2**-13)] * 15], 1),
    ("the accumulator keeps 2^-22 beside an 8", 1 + 2**-21, [(8, 1), (-8, 1)], 1 + 2**-21),
    ("and loses 2^-23", 1 + 2**-23, [(8, 1), (-8, 1)], 1),
    ("a product's exponent is that of its factors", 0, [(1.5, 1.5), (1.5, -1.5), (2**-12, 2**-13)], 2**-25),
    ("zeros have no exponent", 2**-60, [(2**60, 0), (0, 2**60)], 2**-60),
    ("the largest exponents", 0, [(2**60, 2**60), (2**-60, 2**-60)], 2.0**120),
    ("infinity", 0, [(np.inf, 1), (1, 1)], np.inf),
    ("not a number", 0, [(np.inf, 1), (-np.inf, 1)], np.nan),
]
OF_E4M3 = [
    # Terms keep multiples of 2^-13 beside a 1, and so does the sum.
    ("four terms lose a fifth", 0, [(1, 1), *[(1.25 * 2**-6, 2**-7)] * 4], 1 + 2**-11),
    ("of either sign", 0, [(-1, 1), *[(1.25 * 2**-6, -(2**-7))] * 4], -1 - 2**-11),
    ("smaller ones are lost", 0, [(1, 1), *[(1.75 * 2**-6, 2**-8)] * 31], 1),
    ("a sum of 20 keeps multiples of 2^-9", 0, [*[(1, 1)] * 20, *[(1.5 * 2**-6, 2**-4)] * 3], 20 + 2**-8),
    ("the accumulator keeps 13 bits", 1 + 2**-13 + 2**-14, [(1, 0)], 1 + 2**-13),
    ("a subnormal factor has the lowest exponent", 2**-9 + 2**-21, [(2**-9, 1)], 2**-8),
]
CASES = [
    pytest.param(kind, *values, id=f"{kind} {name}")
    for kind, sums in (("bf16", OF_BF16), ("e4m3", OF_E4M3))
    for name, *values in sums
]


def matrices(kind, pairs, rows, columns):
    """Factors A `[rows, depth]` and B `[columns, depth]` whose every product is the sum of the products of pairs."""
    depth = 32 if kind == "e4m3" else 16
    left, right = np.float32([*pairs, *[(0, 0)] * (depth - len(pairs))]).T
    return np.tile(left, (rows, 1)), np.tile(right, (columns, 1))


@pytest.mark.parametrize(("kind", "before", "pairs", "expected"), CASES)
def test_mma(kind, before, pairs, expected):
    a, b = matrices(kind, pairs, 16, 8)
    got = product(a, b.T, np.full((16, 8), before), kind, a.shape[1], "sm_90", orders=TRUNCATED)
    np.testing.assert_array_equal(got, fragment_c(np.full((16, 8), expected, np.float32)))


@pytest.mark.parametrize("in_registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize(("kind", "before", "pairs", "expected"), CASES)
def test_wgmma(kind, before, pairs, expected, in_registers):
    own = Product(kind, in_registers=in_registers)
    own.a, own.b = matrices(kind, pairs, 64, 16)
    own.place()
    got = own.run(FENCE + own.instruction() + COMMIT + WAIT, before, TRUNCATED)
    np.testing.assert_array_equal(got, np.full_like(got, expected))


@pytest.mark.parametrize("negate", [(-1, 1), (-1, -1)])
def test_wgmma_of_negated_operands(negate):
    own = Product()
    own.a, own.b = matrices("bf16", [(1, 1), *[(2**-12, 1.5 * 2**-13)] * 4], 64, 16)
    own.place()
    got = own.run(FENCE + own.instruction(negate=negate) + COMMIT + WAIT, 0.0, TRUNCATED)
    np.testing.assert_array_equal(got, np.full_like(got, negate[0] * negate[1] * (1 + 2**-23)))


def test_tcgen05():
    """D starts as 1."""
    a, b = matrices("bf16", [(2**-12, 1.5 * 2**-13)] * 4, ROWS, 16)
    got = Steps().run(brains(a.tolist()), brains(b.tolist()), orders=TRUNCATED)
    np.testing.assert_array_equal(got, np.full_like(got, 1 + 2**-23))


def test_without_the_option_each_product_is_rounded():
    a, b = matrices("bf16", [(1, 1), *[(2**-12, 1.5 * 2**-13)] * 4], 16, 8)
    assert (product(a, b.T, np.zeros((16, 8)), "bf16", 16) == 1).all()


def test_scaled_products_are_refused():
    ones, words = np.ones((16, 32), np.float32), np.full((2, 32), 0x7F7F7F7F, np.uint32)
    with pytest.raises(EmulationError, match="mma block_scale: truncated sums are not implemented"):
        product(ones, ones.T[:, :8], np.zeros((16, 8)), "e4m3", 32, "sm_120", None, words, orders=TRUNCATED)
    with pytest.raises(EmulationError, match=r"tcgen05\.mma block_scale: truncated sums are not implemented"):
        ScaledProduct().run(TRUNCATED)
