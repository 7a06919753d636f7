"""Floating-point arithmetic, against IEEE 754 and the peculiarities that the PTX ISA specifies."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import bits, brains, halves, lanes

NAN, INF = math.nan, math.inf
TINY = 1e-40  # subnormal in fp32
F32, F64 = "f32 f32 f32", "f64 f64 f64"

BY_HAND = [
    ("add.f32", F32, [(1, 2**-24, 1), (1, 3 * 2**-24, 1 + 2**-22), (INF, -INF, NAN), (TINY, 0, np.float32(TINY))]),
    ("add.ftz.f32", F32, [(TINY, 0, 0), (TINY, 1, 1)]),
    ("sub.f32", F32, [(1, 2**-25, 1), (INF, INF, NAN)]),
    ("mul.f32", F32, [(3e38, 10, INF), (0, INF, NAN), (2**-80, 2**-60, 2**-140)]),
    ("mul.ftz.f32", F32, [(2**-80, 2**-60, 0), (2**-80, 2**-40, 2**-120)]),
    ("div.rn.f32", F32, [(1, 3, np.float32(1) / np.float32(3)), (1, 0, INF), (-1, 0, -INF), (0, 0, NAN)]),
    ("div.full.f32", F32, [(1, 4, 0.25), (6, 3, 2)]),
    ("fma.rn.f32", "f32 f32 f32 f32", [(1 + 2**-12, 1 + 2**-12, -1 - 2**-11, 2**-24)]),  # rounded once
    ("fma.rn.ftz.f32", "f32 f32 f32 f32", [(TINY, 2**20, 1, 1), (2**-80, 2**-60, TINY, 0)]),
    ("add.f64", F64, [(1, 2**-53, 1), (1, 2**-52, 1 + 2**-52)]),
    ("mul.f64", F64, [(1e200, 1e200, INF)]),
    ("div.rn.f64", F64, [(1, 3, 1 / 3)]),
    ("fma.rn.f64", "f64 f64 f64 f64", [(1 + 2**-30, 1 + 2**-30, -1 - 2**-29, 2**-60)]),
    # A NaN gives the other operand; with .NaN it gives a NaN.
    ("min.f32", F32, [(NAN, 1, 1), (1, NAN, 1), (NAN, NAN, NAN), (-INF, 3, -INF)]),
    ("max.f32", F32, [(NAN, 1, 1), (1, NAN, 1), (NAN, NAN, NAN), (-INF, 3, 3)]),
    ("min.NaN.f32", F32, [(NAN, 1, NAN), (1, NAN, NAN), (1, 2, 1)]),
    ("max.NaN.f32", F32, [(NAN, 1, NAN), (1, NAN, NAN), (1, 2, 2)]),
    ("max.ftz.f32", F32, [(TINY, -1, 0)]),
    ("min.f64", F64, [(NAN, 1, 1), (2, 1, 1)]),
    (
        "add.f16",
        "f16 f16 f16",
        [(1, 2**-11, 1), (1, 3 * 2**-11, 1 + 2**-9), (65504, 16, INF), (2**-24, 2**-24, 2**-23)],
    ),
    ("mul.f16", "f16 f16 f16", [(2**-12, 2**-12, 2**-24), (2**-13, 2**-12, 0), (300, 300, INF)]),
    ("max.f16", "f16 f16 f16", [(NAN, 1, 1), (1, 2, 2)]),
    ("max.NaN.f16", "f16 f16 f16", [(NAN, 1, NAN)]),
    ("rcp.approx.ftz.f32", "f32 f32", [(4, 0.25), (0, INF), (TINY, INF), (INF, 0)]),
    ("rcp.rn.f32", "f32 f32", [(3, np.float32(1) / np.float32(3))]),
    ("sqrt.rn.f32", "f32 f32", [(2, np.sqrt(np.float32(2))), (-1, NAN), (INF, INF)]),
    ("rsqrt.approx.f32", "f32 f32", [(4, 0.5), (0, INF), (INF, 0), (-1, NAN)]),
    ("ex2.approx.f32", "f32 f32", [(3, 8), (-INF, 0), (INF, INF), (0, 1)]),
    ("ex2.approx.ftz.f32", "f32 f32", [(-140, 0), (-126, 2**-126)]),
    ("lg2.approx.f32", "f32 f32", [(8, 3), (0, -INF), (-1, NAN), (1, 0)]),
    ("abs.f32", "f32 f32", [(-3, 3), (-INF, INF)]),
    ("neg.ftz.f32", "f32 f32", [(TINY, 0), (3, -3)]),
]


@pytest.mark.parametrize(("instruction", "kinds", "rows"), BY_HAND, ids=[row[0] for row in BY_HAND])
def test_is_as_by_hand(instruction, kinds, rows):
    *columns, expected = zip(*rows, strict=True)
    operands = ", ".join("dabc"[: len(columns) + 1])
    got = lanes(f"{instruction} {operands};", kinds, *columns)
    np.testing.assert_array_equal(got, np.asarray(expected, got.dtype))


@pytest.mark.parametrize(
    ("instruction", "a", "b", "expected"),
    [
        ("min.f32", -0.0, 0.0, -0.0),  # "-0.0 < +0.0"
        ("min.f32", 0.0, -0.0, -0.0),
        ("max.f32", -0.0, 0.0, 0.0),
        ("max.f32", 0.0, -0.0, 0.0),
        ("mul.ftz.f32", -(2.0**-80), 2.0**-60, -0.0),  # flushed to a zero of its sign
        ("copysign.f32", -0.0, 3.0, -3.0),  # the sign of a, the value of b
        ("copysign.f32", 2.0, -3.0, 3.0),
    ],
)
def test_signs_of_zeros_are_kept(instruction, a, b, expected):
    got = lanes(f"{instruction} d, a, b;", F32, [a], [b])
    assert got.view(np.uint32) == bits(expected)


@pytest.mark.parametrize(("name", "tolerance"), [("sin", 2**-20), ("cos", 2**-20), ("tanh", 2**-10)])
def test_approximations_are_close(name, tolerance):
    a = np.linspace(-3, 3, 32, dtype=np.float32)
    got = lanes(f"{name}.approx.f32 d, a;", "f32 f32", a)
    np.testing.assert_allclose(got, getattr(np, name)(a.astype(np.float64)), atol=tolerance)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "min", "max"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_of_halves_are_two_numbers(kind, name):
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    torch.manual_seed(0)
    a, b = (torch.randn(64).to(dtype) for _ in range(2))
    rn = ".rn" if name in ("add", "sub", "mul") else ""
    got = lanes(f"{name}{rn}.{kind}x2 d, a, b;", "u32 u32 u32", *(x.view(torch.uint32).numpy() for x in (a, b)))
    other = {"min": torch.minimum, "max": torch.maximum}.get(name) or getattr(torch, name)
    assert torch.equal(torch.from_numpy(got).view(dtype), other(a, b))


@pytest.mark.parametrize(
    ("kind", "pack", "a", "b", "c", "expected"),
    [
        # The exact sum is a little above the middle of two halves, and in fp32 exactly there.
        ("f16", halves, 3, 683 / 2048, 2**-24, 1 + 2**-10),
        ("bf16", brains, 3, 87 / 256, 2**-30, 262 / 256),
        ("f16", halves, 1 + 2**-10, 1 + 2**-10, -1, 2**-9 + 2**-20),
        ("bf16", brains, 1 + 2**-7, 1 - 2**-7, -1, -(2**-14)),
    ],
    ids=["f16_above_middle", "bf16_above_middle", "f16_exact", "bf16_exact"],
)
def test_fma_of_halves_rounds_once(kind, pack, a, b, c, expected):
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    step = Fraction(expected) - exact
    assert abs(step) <= Fraction(1, 2**8) * abs(exact)  # the expectation is a rounding of it
    columns = [pack([x]) for x in (a, b, c)]
    assert lanes(f"fma.rn.{kind} d, a, b, c;", "u16 u16 u16 u16", *columns) == pack([expected])
    pairs = [x.astype(np.uint32) * 0x10001 for x in columns]
    got = lanes(f"fma.rn.{kind}x2 d, a, b, c;", "u32 u32 u32 u32", *pairs)
    assert got == pack([expected]).astype(np.uint32) * 0x10001


# Instructions of sm_100, of pairs of fp32: d = f(a, b, c) of both.
PAIRS = [
    ("add.rn.f32x2", [(1, 2**-24, 1), (1, 3 * 2**-24, 1 + 2**-22)]),
    ("sub.rn.f32x2", [(1, 2**-25, 1), (5, 7, -2)]),
    ("mul.rn.f32x2", [(3e38, 10, INF), (2**-80, 2**-60, 2**-140)]),
    ("mul.rn.ftz.f32x2", [(TINY, 1, 0), (2**-80, 2**-60, 0)]),
    ("fma.rn.f32x2", [(1 + 2**-12, 1 + 2**-12, -1 - 2**-11, 2**-24), (2, 3, 4, 10)]),
    ("fma.rn.ftz.f32x2", [(TINY, 2**20, 1, 1), (2**-80, 2**-60, TINY, 0)]),
]


@pytest.mark.parametrize(("instruction", "rows"), PAIRS, ids=[row[0] for row in PAIRS])
def test_pairs_of_fp32_are_two_numbers(instruction, rows):
    *columns, expected = (np.array(column, np.float32).view(np.uint64) for column in zip(*rows, strict=True))
    operands = ", ".join("dabc"[: len(columns) + 1])
    got = lanes(f"{instruction} {operands};", " ".join(["u64"] * (len(columns) + 1)), *columns, target="sm_100")
    np.testing.assert_array_equal(got.view(np.float32), expected.view(np.float32))


@pytest.mark.parametrize(("kind", "pack"), [("f16", halves), ("bf16", brains)])
def test_halves_are_added_to_fp32(kind, pack):
    a, b, c = pack([3, -0.5]), pack([1.5, 2]), [2**-20, 8]
    one = "f32 u16 f32"
    assert lanes(f"add.rn.f32.{kind} d, a, b;", one, a, c, target="sm_100").tolist() == [3 + 2**-20, 7.5]
    assert lanes(f"sub.rn.f32.{kind} d, a, b;", one, a, c, target="sm_100").tolist() == [3 - 2**-20, -8.5]
    got = lanes(f"fma.rn.f32.{kind} d, a, b, c;", "f32 u16 u16 f32", a, b, c, target="sm_100")
    assert got.tolist() == [4.5 + 2**-20, 7]


@pytest.mark.parametrize(
    ("instruction", "row", "expected"),
    [
        ("min.f32", (3, NAN, 2), 2),
        ("max.f32", (3, NAN, 4), 4),
        ("max.f32", (5, 1, 4), 5),
        ("min.NaN.f32", (3, NAN, 2), NAN),
        ("max.NaN.f32", (3, 1, 7), 7),
        ("max.ftz.f32", (TINY, -1, 0), 0),
    ],
)
def test_of_three_numbers(instruction, row, expected):
    got = lanes(f"{instruction} d, a, b, c;", "f32 f32 f32 f32", *([x] for x in row), target="sm_100")
    np.testing.assert_array_equal(got, [np.float32(expected)])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_signs_of_nan_halves_change_like_others(kind):
    values = [0xFFFF, 0x8000, 0x3C00]
    assert lanes(f"neg.{kind} d, a;", "u16 u16", values).tolist() == [0x7FFF, 0, 0xBC00]
    assert lanes(f"abs.{kind} d, a;", "u16 u16", values).tolist() == [0x7FFF, 0, 0x3C00]


@pytest.mark.parametrize("line", ["add.rz.f32 d, a, b;", "add.sat.f32 d, a, b;", "fma.rn.relu.f16 d, a, b, a;"])
def test_a_modifier_that_is_not_known_is_an_error(line):
    kinds = "f16 f16 f16" if "f16" in line else F32
    with pytest.raises(EmulationError, match=r"PTX line \d+"):
        lanes(line, kinds, [1], [2])
