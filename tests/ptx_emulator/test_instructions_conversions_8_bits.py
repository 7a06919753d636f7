"""cvt of pairs of 8-bit floats and of scale factors, against tables of their values by the OCP's definitions."""

import numpy as np
import pytest
import torch
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import ORDERS, QUARTERS, halves, lanes, run_ptx

NAN_8, NAN_16 = 0x7F, 0x7FFF  # "NaN results are the canonical NaN"


def values_of(exponent_bits, fraction_bits, numbers):
    """The numbers of a format without sign, in the order of their bits: from 0 to the largest."""
    code = np.arange(numbers)
    exponent, fraction = code >> fraction_bits, code & ((1 << fraction_bits) - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    significand = fraction / 2.0**fraction_bits + (exponent > 0)
    return significand * 2.0 ** (np.maximum(exponent, 1) - bias)


# All that follows the largest number is infinity or NaN: 448 is 0x7e, 57344 is 0x7b.
FORMATS = {"e4m3": values_of(4, 3, 0x7F), "e5m2": values_of(5, 2, 0x7C)}
POWERS = 2.0 ** (np.arange(255) - 127)  # of ue8m0


def magnitude(x):
    """|x|, and 0 of a NaN."""
    return np.abs(np.where(np.isnan(x), 0, x).astype(np.float64))


def nearest(values, x):
    """The bits of the nearest number, even where there are two; beyond the largest it is the largest (.satfinite)."""
    size = np.minimum(magnitude(x), values[-1])
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    to_above, to_below = values[above] - size, size - values[below]
    pick_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    bits = np.where(pick_above, above, below) | np.signbit(x) * 0x80
    return np.where(np.isnan(x), NAN_8, bits)


def power(x, rounding, finite):
    """The bits of the power of two next to |x|; beyond 2^127 that of NaN, or with .satfinite 2^127."""
    size = magnitude(x)
    if rounding == "rp":
        bits = np.searchsorted(POWERS, size)
    else:
        bits = np.maximum(np.searchsorted(POWERS, size, "right") - 1, 0)
    bits = np.where(np.isinf(size) | (bits > 254), 254 if finite else 255, bits)
    return np.where(np.isnan(x), 255, bits)


def converted(line, *columns, result):
    """The results of `line` for the elements of the columns, which are `%r1` (or `%h1`) and `%r2`, in `%r3` (`%h3`)."""
    count, threads = len(columns[0]), 256
    padded = [np.resize(column, -(-count // threads) * threads) for column in columns]
    out = np.zeros(len(padded[0]), result)
    text = f"mov.u32 %r0, %ctaid.x; mad.lo.u32 %r0, %r0, {threads}, %tid;"

    def register(array, k):
        return f"b{8 * array.itemsize} {'%h' if array.itemsize == 2 else '%r'}{k}".split()

    for k, array in enumerate(padded):
        kind, name = register(array, k + 1)
        text += f"mad.wide.u32 %d0, %r0, {array.itemsize}, %a{k}; ld.global.{kind} {name}, [%d0];"
    kind, name = register(out, 3)
    text += f"{line} mad.wide.u32 %d0, %r0, {out.itemsize}, %a{len(columns)}; st.global.{kind} [%d0], {name};"
    run_ptx(text, *padded, out, target="sm_100", threads=threads, grid=(len(out) // threads, 1, 1), orders=ORDERS[:1])
    return out[:count]


def floats(values):
    """fp32 to convert: all numbers of a format, the middles between them and what is next to these, and others."""
    middles = np.append((values[1:] + values[:-1]) / 2, values[-1] * 1.5 - values[-2] / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(to)) for to in (0, np.inf)]
    rng = np.random.default_rng(0)
    wide = np.exp2(rng.uniform(-22, 20, 4000)) * rng.uniform(1, 2, 4000)
    anything = rng.integers(0, 2**32, 2000, np.uint32).view(np.float32)
    special = [0, np.inf, np.nan, 3.4e38, 1e-45, 2.0**-126]
    positive = np.concatenate([values, middles, *around, wide, special]).astype(np.float32)
    return np.concatenate([positive, -positive, anything])


@pytest.mark.parametrize("kind", FORMATS)
def test_the_tables_are_those_of_torch(kind):
    codes = torch.arange(len(FORMATS[kind]), dtype=torch.uint8)
    np.testing.assert_array_equal(codes.view(QUARTERS[kind]).float().numpy(), FORMATS[kind])
    assert FORMATS[kind][-1] == torch.finfo(QUARTERS[kind]).max


@pytest.mark.parametrize("kind", FORMATS)
def test_two_fp32(kind):
    """The first is the upper half."""
    x = floats(FORMATS[kind])
    upper, lower = x, np.roll(x, 7)
    got = converted(f"cvt.rn.satfinite.{kind}x2.f32 %h3, %r1, %r2;", upper, lower, result=np.uint16)
    np.testing.assert_array_equal(got, nearest(FORMATS[kind], upper) << 8 | nearest(FORMATS[kind], lower))


HAND = [
    # Around the largest numbers, the least ones, and ties; 464 and 61440 are the first that would not be finite.
    ("e4m3", [448, 463.9, 464, 1e9, np.inf, -480, -np.inf], [0x7E] * 5 + [0xFE] * 2),
    ("e4m3", [2**-9, 2**-10, 1.01 * 2**-10, 3 * 2**-10, 2**-6, -0.0], [1, 0, 1, 2, 8, 0x80]),
    ("e4m3", [1, 1.0625, 1.1875, 1.125 * 2**-6], [0x38, 0x38, 0x3A, 0x09]),
    ("e5m2", [57344, 61440, 1e9, np.inf, -np.inf], [0x7B] * 4 + [0xFB]),
    ("e5m2", [2**-16, 2**-17, 3 * 2**-17, 2**-14, 1.125, 1.375], [1, 0, 2, 4, 0x3C, 0x3E]),
    ("e4m3", [np.nan, -np.nan], [NAN_8] * 2),
    ("e5m2", [np.nan, -np.nan], [NAN_8] * 2),
]


@pytest.mark.parametrize(("kind", "x", "expected"), HAND, ids=[f"{i}_{row[0]}" for i, row in enumerate(HAND)])
def test_by_hand(kind, x, expected):
    got = lanes(f"cvt.rn.satfinite.{kind}x2.f32 d, 0f3F800000, a;", "u16 f32", x)
    one = {"e4m3": 0x38, "e5m2": 0x3C}[kind] << 8
    assert got.tolist() == [one | bits for bits in expected]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_pair_of_halves(kind):
    bits = np.arange(2**16, dtype=np.uint16)
    lower, upper = bits, np.roll(bits, 12345)
    pairs = upper.astype(np.uint32) << 16 | lower
    got = converted(f"cvt.rn.satfinite.{kind}x2.f16x2 %h3, %r1;", pairs, result=np.uint16)
    expected = [nearest(FORMATS[kind], half.view(np.float16)) for half in (upper, lower)]
    np.testing.assert_array_equal(got, expected[0] << 8 | expected[1])


def as_half(kind, code):
    """Bits of fp16 of these bytes."""
    values = FORMATS[kind]
    rest = np.append(values, np.full(128 - len(values), np.nan))
    if kind == "e5m2":
        rest[0x7C] = np.inf
    half = halves(rest[code & 0x7F]) | (code.astype(np.uint16) & 0x80) << 8
    return np.where(np.isnan(rest[code & 0x7F]), NAN_16, half).astype(np.uint32)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_pair_of_bytes(kind):
    pairs = np.arange(2**16, dtype=np.uint16)
    upper, lower = as_half(kind, pairs >> 8), as_half(kind, pairs & 0xFF)
    got = converted(f"cvt.rn.f16x2.{kind}x2 %r3, %h1;", pairs, result=np.uint32)
    np.testing.assert_array_equal(got, upper << 16 | lower)


@pytest.mark.parametrize("kind", FORMATS)
def test_relu(kind):
    code = {"e4m3": 0x38, "e5m2": 0x3C}[kind]
    x = [1, -1, -1e9, np.nan]
    got = lanes(f"cvt.rn.satfinite.relu.{kind}x2.f32 d, a, 0fBF800000;", "u16 f32", x)
    assert got.tolist() == [code << 8, 0, 0, NAN_8 << 8]
    got = lanes(f"cvt.rn.relu.f16x2.{kind}x2 d, a;", "u32 u16", [code << 8 | code | 0x80, NAN_8])
    assert got.tolist() == [0x3C00 << 16, NAN_16]


MODES = [(rounding, finite) for rounding in ("rz", "rp") for finite in (False, True)]


@pytest.mark.parametrize(("rounding", "finite"), MODES)
def test_scale_factors_of_fp32(rounding, finite):
    x = floats(POWERS)
    upper, lower = x, np.roll(x, 7)
    line = f"cvt.{rounding}{'.satfinite' * finite}.ue8m0x2.f32 %h3, %r1, %r2;"
    got = converted(line, upper, lower, result=np.uint16)
    np.testing.assert_array_equal(got, power(upper, rounding, finite) << 8 | power(lower, rounding, finite))


@pytest.mark.parametrize(("rounding", "finite"), MODES)
def test_scale_factors_by_hand(rounding, finite):
    up, beyond = rounding == "rp", 254 if finite else 255
    x = [0, 2.0**-149, 2.0**-127, 1.5 * 2**-127, 2.0**-126, 1, 1.001, -3, 2.0**127, np.inf, np.nan]
    expected = [0, 0, 0, up, 1, 127, 127 + up, 128 + up, 254, beyond, 255]
    got = lanes(f"cvt.{rounding}{'.satfinite' * finite}.ue8m0x2.f32 d, 0f3F800000, a;", "u16 f32", x, target="sm_100")
    assert got.tolist() == [127 << 8 | bits for bits in expected]
    got = lanes(f"cvt.{rounding}{'.satfinite' * finite}.ue8m0x2.f32 d, a, 0f40000000;", "u16 f32", [3.4e38])
    assert got.tolist() == [(beyond if up else 254) << 8 | 128]


@pytest.mark.parametrize(("rounding", "finite"), MODES)
def test_scale_factors_of_every_bf16(rounding, finite):
    lower = np.arange(2**16, dtype=np.uint32)
    upper = np.roll(lower, 12345)
    line = f"cvt.{rounding}{'.satfinite' * finite}.ue8m0x2.bf16x2 %h3, %r1;"
    got = converted(line, upper << 16 | lower, result=np.uint16)
    expected = [power((half << 16).view(np.float32), rounding, finite) for half in (upper, lower)]
    np.testing.assert_array_equal(got, expected[0] << 8 | expected[1])


def test_every_scale_factor_to_bf16():
    codes = np.arange(256)
    values = np.append(POWERS, np.nan).astype(np.float32).view(np.uint32) >> 16
    values[255] = NAN_16
    got = converted("cvt.rn.bf16x2.ue8m0x2 %r3, %h1;", (codes << 8 | 255 - codes).astype(np.uint16), result=np.uint32)
    np.testing.assert_array_equal(got, values << 16 | values[::-1])
    assert values[0] == 0x0040  # 2^-127 is a subnormal number


@pytest.mark.parametrize(
    ("instruction", "kinds", "x", "expected"),
    [
        ("cvt.rn.satfinite.f16.f32 d, a;", "u16 f32", [65519, 65520, -1e9, np.inf, 1.5], [0x7BFF] * 2 + [0xFBFF]),
        ("cvt.rn.satfinite.bf16.f32 d, a;", "u16 f32", [3.4e38, -np.inf, np.nan], [0x7F7F, 0xFF7F, NAN_16]),
        ("cvt.rna.satfinite.tf32.f32 d, a;", "u32 f32", [3.4028e38, -np.inf], [0x7F7FE000, 0xFF7FE000]),
        ("cvt.rn.satfinite.f16x2.f32 d, a, 0f7F800000;", "u32 f32", [-1e9], [0xFBFF7BFF]),
    ],
    ids=["f16", "bf16", "tf32", "f16x2"],
)
def test_wider_floats_may_be_kept_finite(instruction, kinds, x, expected):
    assert lanes(instruction, kinds, x).tolist()[: len(expected)] == expected


@pytest.mark.parametrize(
    "line",
    [
        "cvt.rn.e4m3x2.f32 %h3, %r1, %r2;",
        "cvt.satfinite.e4m3x2.f32 %h3, %r1, %r2;",
        "cvt.rz.satfinite.e5m2x2.f32 %h3, %r1, %r2;",
        "cvt.rn.satfinite.e4m3x2.f32 %h3, %r1;",
        "cvt.rn.satfinite.e4m3x2.f32 %r3, %r1, %r2;",
        "cvt.rn.satfinite.e4m3x2.ue8m0x2 %h3, %h1;",
        "cvt.rn.satfinite.f16x2.e4m3x2 %r3, %h1;",
        "cvt.f16x2.e4m3x2 %r3, %h1;",
        "cvt.rn.bf16x2.e4m3x2 %r3, %h1;",
        "cvt.rn.ue8m0x2.f32 %h3, %r1, %r2;",
        "cvt.rp.relu.ue8m0x2.f32 %h3, %r1, %r2;",
        "cvt.rp.ue8m0x2.f16x2 %h3, %r1;",
        "cvt.rn.f32.e4m3x2 %r3, %h1;",
        "cvt.rn.satfinite.e2m1x2.f32 %h3, %r1, %r2;",
        "cvt.rs.satfinite.e4m3x4.f32 %r3, {%r1, %r2, %r1, %r2}, %r1;",
        "cvt.rn.satfinite.f32.f32 %r3, %r1;",
    ],
)
def test_a_conversion_that_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+"):
        run_ptx(line, target="sm_100")
