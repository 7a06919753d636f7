"""cvt: roundings, saturation and NaNs, by the PTX ISA's section on it."""

import math

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import bits, brains, halves, lanes

NAN, INF = math.nan, math.inf
HALF_NAN = 0x7FFF  # of fp16 and of bf16: "NaN results are the canonical NaN"
TOP16, TOP_BF16 = 0x7BFF, 0x7F7F  # the largest numbers
E = 2**-40  # less than half a step of anything here


TO_HALVES = [
    ("cvt.rn.f16.f32", [1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, -65520], halves([1, 1 + 2**-9, 65504, INF, -INF])),
    ("cvt.rn.f16.f32", [2**-25, 1.5 * 2**-25, NAN, -0.0], [0, 1, HALF_NAN, 0x8000]),
    # Towards zero nothing overflows.
    ("cvt.rz.f16.f32", [1 + 1.9 * 2**-10, -1 - 1.9 * 2**-10, 1e9, -1e9], [0x3C01, 0xBC01, TOP16, TOP16 + 0x8000]),
    ("cvt.rz.f16.f32", [INF, 1.9 * 2**-24, NAN], [0x7C00, 1, HALF_NAN]),
    ("cvt.rm.f16.f32", [1 + 2**-11, -1 - 2**-12], halves([1, -1 - 2**-10])),
    ("cvt.rp.f16.f32", [1 + 2**-12, -1 - 2**-11], halves([1 + 2**-10, -1])),
    ("cvt.rn.bf16.f32", [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, NAN], [0x3F80, 0x3F82, 0x7F80, 0xFF80, HALF_NAN]),
    ("cvt.rz.bf16.f32", [1 + 1.9 * 2**-7, 3.4e38, NAN], [0x3F81, TOP_BF16, HALF_NAN]),
    ("cvt.rn.relu.bf16.f32", [-1, 2, NAN], [0, 0x4000, HALF_NAN]),
    ("cvt.rn.relu.f16.f32", [-1, 2, NAN], [0, 0x4000, HALF_NAN]),
    ("cvt.rn.sat.f16.f32", [-1, 2, 0.5, NAN], halves([0, 1, 0.5, 0])),
]


@pytest.mark.parametrize(
    ("instruction", "a", "expected"), TO_HALVES, ids=[f"{i}_{r[0]}" for i, r in enumerate(TO_HALVES)]
)
def test_fp32_to_halves(instruction, a, expected):
    assert lanes(f"{instruction} d, a;", "u16 f32", a).tolist() == list(expected)


@pytest.mark.parametrize(("kind", "pack"), [("f16", halves), ("bf16", brains)])
def test_of_a_pair_the_first_is_the_upper(kind, pack):
    expected = pack([1.5, 2]).astype(np.uint32)
    assert lanes(f"cvt.rn.{kind}x2.f32 d, a, b;", "u32 f32 f32", [1.5], [2]) == expected[0] << 16 | expected[1]
    assert lanes(f"cvt.rn.relu.{kind}x2.f32 d, a, b;", "u32 f32 f32", [-1.5], [2]) == expected[1]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("rna", [0x3F802000, 0x3F802000, 0xBF802000]),
        ("rn", [0x3F800000, 0x3F802000, 0xBF800000]),
        ("rz", [0x3F800000] * 2 + [0xBF800000]),
    ],
)
def test_tf32_keeps_ten_bits(mode, expected):
    a = [1 + 2**-11, 1 + 2**-11 + 2**-23, -1 - 2**-11]
    assert lanes(f"cvt.{mode}.tf32.f32 d, a;", "u32 f32", a).tolist() == expected


def test_halves_to_fp32_are_exact():
    every = np.arange(0, 2**16, 2**11 + 7, dtype=np.uint16)
    got = lanes("cvt.f32.f16 d, a;", "f32 u16", every)
    np.testing.assert_array_equal(got, every.view(np.float16).astype(np.float32))
    got = lanes("cvt.f32.bf16 d, a;", "u32 u16", every)
    np.testing.assert_array_equal(got, every.astype(np.uint32) << 16)


TO_INTEGERS = [
    ("cvt.rzi.s32.f32", "s32 f32", [1.9, -1.9, 3e9, -3e9, INF], [1, -1, 2**31 - 1, -(2**31), 2**31 - 1]),
    ("cvt.rni.s32.f32", "s32 f32", [2.5, 3.5, -2.5, 0.5], [2, 4, -2, 0]),
    ("cvt.rmi.s32.f32", "s32 f32", [-1.1, 1.9], [-2, 1]),
    ("cvt.rpi.s32.f32", "s32 f32", [1.1, -1.9], [2, -1]),
    ("cvt.rzi.u32.f32", "u32 f32", [-1, 5e9, 3e9], [0, 2**32 - 1, 3_000_000_000]),
    ("cvt.rzi.u64.f32", "u64 f32", [-1, 1e20, 2**40], [0, 2**64 - 1, 2**40]),
    ("cvt.rzi.s64.f64", "s64 f64", [-1e300, 1e300, -(2.0**52) - 0.5], [-(2**63), 2**63 - 1, -(2**52)]),
    ("cvt.rzi.u16.f32", "u16 f32", [70000, -5, 7.9], [65535, 0, 7]),
    ("cvt.rzi.s8.f32", "s32 f32", [200, -200, 5.5], [127, -128, 5]),
    ("cvt.rzi.s32.f16", "s32 f16", [65504, -1.5], [65504, -1]),
    # NaN is 0 "if source is not .f64 and destination is not .s64/.u64", otherwise the highest bit alone.
    ("cvt.rzi.s32.f32", "s32 f32", [NAN], [0]),
    ("cvt.rzi.u32.f32", "u32 f32", [NAN], [0]),
    ("cvt.rzi.s64.f32", "s64 f32", [NAN], [-(2**63)]),
    ("cvt.rzi.u64.f32", "u64 f32", [NAN], [2**63]),
    ("cvt.rzi.s32.f64", "s32 f64", [NAN], [-(2**31)]),
    ("cvt.rzi.u32.f64", "u32 f64", [NAN], [2**31]),
    # Between integers: low bits, but clamped with .sat; narrow types sign-extend in a wider register.
    ("cvt.u8.u32", "u32 u32", [300], [44]),
    ("cvt.s8.s32", "s32 s32", [200], [-56]),
    ("cvt.s32.s8", "s32 u32", [0x1FF, 0x7F], [-1, 127]),
    ("cvt.u32.u8", "u32 u32", [0x1FF], [255]),
    ("cvt.sat.s8.s32", "s32 s32", [200, -200, 5], [127, -128, 5]),
    ("cvt.sat.u8.s32", "u32 s32", [-1, 300], [0, 255]),
    ("cvt.sat.u32.s32", "u32 s32", [-1, 7], [0, 7]),
    ("cvt.sat.s32.s64", "s32 s64", [2**40, -(2**40)], [2**31 - 1, -(2**31)]),
    ("cvt.s64.s32", "s64 s32", [-1], [-1]),
    ("cvt.u64.u32", "u64 u32", [2**32 - 1], [2**32 - 1]),
    ("cvt.u32.u64", "u32 u64", [2**32 + 5], [5]),
    ("cvt.s16.s32", "s16 s32", [2**16 + 5, 0x8000], [5, -0x8000]),
]


@pytest.mark.parametrize(
    ("instruction", "kinds", "a", "expected"), TO_INTEGERS, ids=[f"{i}_{r[0]}" for i, r in enumerate(TO_INTEGERS)]
)
def test_to_integers(instruction, kinds, a, expected):
    assert lanes(f"{instruction} d, a;", kinds, a).tolist() == expected


TO_FLOATS = [
    # 2**24 + 1 and + 3 lie between two numbers.
    ("cvt.rn.f32.s32", "f32 s32", [2**24 + 1, 2**24 + 3, -(2**24) - 1], [2**24, 2**24 + 4, -(2**24)]),
    ("cvt.rz.f32.s32", "f32 s32", [2**24 + 3, -(2**24) - 3], [2**24 + 2, -(2**24) - 2]),
    ("cvt.rm.f32.s32", "f32 s32", [2**24 + 3, -(2**24) - 1], [2**24 + 2, -(2**24) - 2]),
    ("cvt.rp.f32.s32", "f32 s32", [2**24 + 1, -(2**24) - 3], [2**24 + 2, -(2**24) - 2]),
    ("cvt.rn.f32.u32", "f32 u32", [2**32 - 1], [2**32]),
    ("cvt.rn.f32.u64", "f32 u64", [2**64 - 1, 2**63 + 1], [2**64, 2**63]),
    ("cvt.rz.f32.u64", "f32 u64", [2**64 - 1], [2**64 - 2**40]),
    ("cvt.rn.f64.s64", "f64 s64", [2**53 + 1], [2**53]),
    ("cvt.rn.f16.s32", "f16 s32", [2049, 2051, 70000], [2048, 2052, INF]),
    ("cvt.rn.f32.f64", "f32 f64", [1 + 2**-24, 1 + 2**-24 + E, 1e300], [1, 1 + 2**-23, INF]),
    ("cvt.rz.f32.f64", "f32 f64", [1 + 1.9 * 2**-23, -1 - 1.9 * 2**-23], [1 + 2**-23, -1 - 2**-23]),
    ("cvt.rm.f32.f64", "f32 f64", [1 + 1.9 * 2**-23, -1 - E], [1 + 2**-23, -1 - 2**-23]),
    ("cvt.rp.f32.f64", "f32 f64", [1 + E, -1 - 1.9 * 2**-23], [1 + 2**-23, -1 - 2**-23]),
    ("cvt.f64.f32", "f64 f32", [0.1], [float(np.float32(0.1))]),
    ("cvt.rn.f16.f64", "f16 f64", [1 + 2**-11, 1 + 2**-11 + E], [1, 1 + 2**-10]),  # not by way of fp32
    ("cvt.sat.f32.f32", "f32 f32", [NAN, 1.5, -1, 0.25], [0, 1, 0, 0.25]),
    ("cvt.ftz.f32.f32", "f32 f32", [1e-40, 1], [0, 1]),
    ("cvt.rni.f32.f32", "f32 f32", [2.5, 3.5, -1.5, INF], [2, 4, -2, INF]),
    ("cvt.rzi.f32.f32", "f32 f32", [2.9, -2.9], [2, -2]),
    ("cvt.rmi.f32.f32", "f32 f32", [2.9, -2.1], [2, -3]),
    ("cvt.rpi.f32.f32", "f32 f32", [2.1, -2.9], [3, -2]),
]


@pytest.mark.parametrize(
    ("instruction", "kinds", "a", "expected"), TO_FLOATS, ids=[f"{i}_{r[0]}" for i, r in enumerate(TO_FLOATS)]
)
def test_to_floats(instruction, kinds, a, expected):
    got = lanes(f"{instruction} d, a;", kinds, a)
    np.testing.assert_array_equal(got, np.asarray(expected, got.dtype))


def test_an_integer_to_bf16_is_rounded_once():
    assert lanes("cvt.rn.bf16.s32 d, a;", "u16 s32", [2**30 + 2**22 + 1]) == brains([2**30 + 2**23])


def test_what_rounds_to_zero_keeps_its_sign():
    assert lanes("cvt.rni.f32.f32 d, a;", "f32 f32", [-0.4]).view(np.uint32) == bits(-0.0)


@pytest.mark.parametrize("line", ["cvt.rn.satfinite.e2m3x2.f32 d, a, a;", "cvt.rs.f16x2.f32 d, a, a, a;"])
def test_a_conversion_that_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+"):
        lanes(line, "u32 f32", [1])
