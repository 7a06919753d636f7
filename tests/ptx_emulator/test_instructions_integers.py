"""Integer arithmetic and bits, against values computed by hand; sections are those of the PTX ISA."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import TYPES, lanes

LOW, HIGH = -(2**31), 2**31 - 1
ALL = 2**32 - 1

# Instruction, types of its operands (the result's first), and rows of operands and result.
BY_HAND = [
    ("add.s32", "s32 s32 s32", [(HIGH, 1, LOW), (-5, 3, -2)]),
    ("add.u32", "u32 u32 u32", [(ALL, 2, 1)]),
    ("add.u16", "u16 u16 u16", [(0xFFFF, 2, 1)]),
    ("add.s64", "s64 s64 s64", [(2**63 - 1, 1, -(2**63))]),
    ("sub.u32", "u32 u32 u32", [(0, 1, ALL)]),
    ("sub.s64", "s64 s64 s64", [(1, 2**40, 1 - 2**40)]),
    ("mul.lo.s32", "s32 s32 s32", [(65537, 65537, 131073), (-3, 7, -21)]),
    ("mul.lo.u64", "u64 u64 u64", [(2**32 + 1, 2**32 + 1, 2**33 + 1)]),
    ("mul.hi.u32", "u32 u32 u32", [(ALL, ALL, ALL - 1), (2**16, 2**16, 1)]),
    ("mul.hi.s32", "s32 s32 s32", [(-1, -1, 0), (-1, 1, -1), (LOW, 2, -1)]),
    ("mul.hi.u64", "u64 u64 u64", [(2**64 - 1, 2**64 - 1, 2**64 - 2)]),
    ("mul.hi.s64", "s64 s64 s64", [(-(2**63), -(2**63), 2**62), (-1, 1, -1)]),
    ("mul.wide.u32", "u64 u32 u32", [(ALL, ALL, 0xFFFFFFFE00000001)]),
    ("mul.wide.s32", "s64 s32 s32", [(LOW, LOW, 2**62), (LOW, 1, LOW)]),
    ("mul.wide.u16", "u32 u16 u16", [(0xFFFF, 0xFFFF, 0xFFFE0001)]),
    ("mul.wide.s16", "s32 s16 s16", [(-0x8000, 0x7FFF, -0x3FFF8000)]),
    ("mad.lo.s32", "s32 s32 s32 s32", [(3, -4, 5, -7)]),
    ("mad.hi.u32", "u32 u32 u32 u32", [(2**31, 4, 7, 9)]),
    ("mad.wide.u32", "u64 u32 u32 u64", [(ALL, 2, 3, 2**33 + 1)]),
    ("mad.wide.s32", "s64 s32 s32 s64", [(-2, 3, 2**40, 2**40 - 6)]),
    # Quotients are cut off towards zero, and a remainder has the sign of the dividend.
    ("div.s32", "s32 s32 s32", [(-7, 2, -3), (7, -2, -3), (-7, -2, 3)]),
    ("rem.s32", "s32 s32 s32", [(-7, 2, -1), (7, -2, 1)]),
    # "Division by zero yields an unspecified, machine-specific value": these are the GPU's.
    ("div.u32", "u32 u32 u32", [(7, 0, ALL), (0, 0, ALL), (ALL, 2, HIGH)]),
    ("rem.u32", "u32 u32 u32", [(7, 0, 7), (ALL, 10, 5)]),
    ("div.u64", "u64 u64 u64", [(2**63, 3, 2**63 // 3)]),
    ("min.s32", "s32 s32 s32", [(-1, 1, -1)]),
    ("min.u32", "u32 u32 u32", [(ALL, 1, 1)]),
    ("max.s32", "s32 s32 s32", [(-1, 1, 1)]),
    ("max.u32", "u32 u32 u32", [(ALL, 1, ALL)]),
    ("max.s64", "s64 s64 s64", [(-(2**40), 3, 3)]),
    ("max.relu.s32", "s32 s32 s32", [(-5, -3, 0), (LOW, LOW, 0), (-5, 3, 3), (7, 3, 7)]),
    ("min.relu.s32", "s32 s32 s32", [(-5, 3, 0), (7, 3, 3), (HIGH, HIGH, HIGH)]),
    ("abs.s32", "s32 s32", [(-5, 5), (LOW, LOW)]),
    ("neg.s32", "s32 s32", [(5, -5), (LOW, LOW)]),
    ("not.b32", "u32 u32", [(0x0F0F0F0F, 0xF0F0F0F0)]),
    ("and.b32", "u32 u32 u32", [(0xFF00FF00, 0x0FF00FF0, 0x0F000F00)]),
    ("or.b64", "u64 u64 u64", [(2**63, 1, 2**63 + 1)]),
    ("xor.b16", "u16 u16 u16", [(0xFF00, 0x0FF0, 0xF0F0)]),
    # "Shift amounts greater than the register width N are clamped to N."
    ("shl.b32", "u32 u32 u32", [(1, 31, 2**31), (1, 32, 0), (1, 33, 0), (1, ALL, 0)]),
    ("shl.b64", "u64 u64 u32", [(1, 63, 2**63), (1, 64, 0), (3, 32, 3 * 2**32)]),
    ("shl.b16", "u16 u16 u32", [(1, 15, 0x8000), (1, 16, 0)]),
    ("shr.u32", "u32 u32 u32", [(2**31, 31, 1), (2**31, 32, 0), (ALL, 2**31, 0)]),
    ("shr.s32", "s32 s32 u32", [(-8, 1, -4), (-8, 100, -1), (8, 100, 0)]),
    ("shr.s64", "s64 s64 u32", [(-(2**63), 63, -1), (-(2**63), 64, -1), (2**62, 61, 2)]),
    ("shr.u64", "u64 u64 u32", [(2**63, 63, 1), (2**63, 64, 0)]),
    ("shr.s16", "s16 s16 u32", [(-2, 40, -1), (-2, 1, -1)]),
    # "shf.l" keeps the upper half of the 64 bits b:a, and "shf.r" the lower one.
    ("shf.l.wrap.b32", "u32 u32 u32 u32", [(0x89ABCDEF, 0x01234567, n, 0x23456789) for n in (8, 40)]),
    ("shf.l.clamp.b32", "u32 u32 u32 u32", [(0x89ABCDEF, 0x01234567, n, 0x89ABCDEF) for n in (32, 40)]),
    ("shf.r.wrap.b32", "u32 u32 u32 u32", [(0x89ABCDEF, 0x01234567, n, 0x6789ABCD) for n in (8, 40)]),
    ("shf.r.clamp.b32", "u32 u32 u32 u32", [(0x89ABCDEF, 0x01234567, n, 0x01234567) for n in (32, 40)]),
    # Selectors of bytes of b:a; their fourth bit asks for copies of the byte's sign.
    ("prmt.b32", "u32 u32 u32 u32", [(0x33221100, 0x77665544, 0x7531, 0x77553311)]),
    ("prmt.b32", "u32 u32 u32 u32", [(0x0000FF80, 0, 0x8888, ALL), (0x00007F80, 0, 0x9999, 0)]),
    ("prmt.b32", "u32 u32 u32 u32", [(0x44332211, 0x88776655, 0x3210, 0x44332211)]),
    # "bfe": position and length are taken modulo 256; bits beyond the register are copies of the sign.
    ("bfe.u32", "u32 u32 u32 u32", [(0xABCDEF12, 8, 8, 0xEF), (0xABCDEF12, 8, 0, 0), (0xABCDEF12, 28, 8, 0xA)]),
    ("bfe.u32", "u32 u32 u32 u32", [(ALL, 32, 4, 0), (0xABCDEF12, 264, 264, 0xEF), (5, 0, 40, 5)]),
    ("bfe.s32", "s32 s32 u32 u32", [(LOW, 28, 8, -8), (0xEF00, 8, 8, -17), (-1, 8, 0, 0), (0xEF00, 8, 9, 0xEF)]),
    ("bfe.s32", "s32 s32 u32 u32", [(LOW, 40, 4, -1), (HIGH, 40, 4, 0)]),
    ("bfe.u64", "u64 u64 u32 u32", [(0xABCD << 40, 44, 8, 0xBC)]),
    ("bfe.s64", "s64 s64 u32 u32", [(-(2**63), 60, 8, -8)]),
    # "bfi": without length, or from a position beyond the register, b as it is.
    ("bfi.b32", "u32 u32 u32 u32 u32", [(0xFF, 0, 8, 4, 0xF00), (0xFF, 3, 8, 0, 3), (0xFF, 3, 32, 4, 3)]),
    ("bfi.b32", "u32 u32 u32 u32 u32", [(0xFF, 1, 28, 8, 0xF0000001), (0, ALL, 4, 4, 0xFFFFFF0F)]),
    ("popc.b32", "u32 u32", [(0, 0), (ALL, 32), (0x80000001, 2)]),
    ("popc.b64", "u32 u64", [(0, 0), (2**64 - 1, 64)]),
    ("clz.b32", "u32 u32", [(0, 32), (1, 31), (ALL, 0)]),
    ("clz.b64", "u32 u64", [(0, 64), (1, 63), (2**40, 23)]),
    # The highest bit that differs from the sign; all ones where there is none.
    ("bfind.u32", "u32 u32", [(0, ALL), (1, 0), (2**31, 31)]),
    ("bfind.s32", "u32 s32", [(0, ALL), (-1, ALL), (-2, 0), (LOW, 30), (5, 2)]),
    ("bfind.u64", "u32 u64", [(0, ALL), (2**63, 63)]),
    ("brev.b32", "u32 u32", [(1, 2**31), (0x80000002, 0x40000001)]),
    ("brev.b64", "u64 u64", [(1, 2**63)]),
    ("add.u16x2", "u32 u32 u32", [(0xFFFF0001, 0x00010001, 0x00000002)]),
    ("min.s16x2", "u32 u32 u32", [(0xFFFF0001, 0x00010000, 0xFFFF0000)]),
    ("max.relu.s16x2", "u32 u32 u32", [(0xFFFF0003, 0x80000002, 0x00000003)]),
    ("min.relu.s16x2", "u32 u32 u32", [(0xFFFF0003, 0x00050002, 0x00000002)]),
    ("max.u16x2", "u32 u32 u32", [(0xFFFF0001, 0x00010000, 0xFFFF0001)]),
]


@pytest.mark.parametrize(
    ("instruction", "kinds", "rows"), BY_HAND, ids=[f"{i}_{row[0]}" for i, row in enumerate(BY_HAND)]
)
def test_is_as_by_hand(instruction, kinds, rows):
    *columns, expected = zip(*rows, strict=True)
    operands = ", ".join("dabce"[: len(columns) + 1])
    assert lanes(f"{instruction} {operands};", kinds, *columns).tolist() == list(expected)


@pytest.mark.parametrize("table", [0x96, 0xE8, 0xCA, 0x01, 0x80])
def test_lop3_looks_up_each_bit(table):
    rng = np.random.default_rng(table)
    a, b, c = (rng.integers(0, 2**32, 32, np.uint32) for _ in range(3))
    unpacked = [np.unpackbits(x.view(np.uint8)).astype(int) for x in (a, b, c)]
    bits = table >> (4 * unpacked[0] + 2 * unpacked[1] + unpacked[2]) & 1
    expected = np.packbits(bits.astype(np.uint8)).view(np.uint32)
    np.testing.assert_array_equal(lanes(f"lop3.b32 d, a, b, c, {table};", "u32 u32 u32 u32", a, b, c), expected)


RANDOM = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize("name", RANDOM)
def test_is_numpys(name, kind):
    rng, info = np.random.default_rng(0), np.iinfo(TYPES[kind])
    a, b = (rng.integers(info.min, info.max, 32, TYPES[kind], endpoint=True) for _ in range(2))
    got = lanes(f"{name}.{kind} d, a, b;", f"{kind} {kind} {kind}", a, b)
    np.testing.assert_array_equal(got, RANDOM[name](a, b))


def test_the_first_of_packed_parts_is_the_lowest():
    assert lanes("mov.b64 d, {a, b};", "u64 u32 u32", [1], [2]).tolist() == [2**33 + 1]
    assert lanes("mov.b32 d, {a, b};", "u32 u16 u16", [1], [2]).tolist() == [0x20001]
    assert lanes("mov.b64 {t, u}, a; mov.b32 d, u;", "u32 u64", [2**33 + 1]).tolist() == [2]
    assert lanes("mov.b32 {_, d}, a;", "u16 u32", [0x20001]).tolist() == [2]


@pytest.mark.parametrize(
    "line",
    [
        "addc.u32 d, a, b;",
        "add.sat.s32 d, a, b;",
        "max.relu.u32 d, a, b;",
        "add.relu.s32 d, a, b;",
        "mul24.lo.s32 d, a, b;",
        "dp4a.s32.s32 d, a, b, a;",
        "sad.s32 d, a, b, a;",
    ],
)
def test_what_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*" + line[:-1].replace(".", r"\.")):
        lanes(line, "s32 s32 s32", [1], [2])
