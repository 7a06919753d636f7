"""Comparisons, predicates and guards; NaNs by the PTX ISA's "Comparisons" of floating-point numbers."""

import math
import operator

import numpy as np
import pytest
from ptx_emulator.ptx import TYPES, brains, lanes

COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
NAN, INF = math.nan, math.inf
PAIRS = [(1, 2), (2, 1), (1, 1), (NAN, 1), (1, NAN), (NAN, NAN), (-0.0, 0.0), (INF, INF), (-INF, INF)]
A, B = zip(*PAIRS, strict=True)
SET = "setp.{} p, a, b; selp.b32 d, 1, 0, p;"


def expected_of(name, a, b):
    """The result of a comparison: with a NaN, false if it is ordered (also `ne`), and true if it is unordered."""
    either = math.isnan(a) or math.isnan(b)
    if name in ("num", "nan"):
        return either == (name == "nan")
    ordered = name.removesuffix("u") if len(name) == 3 else name
    return len(name) == 3 if either else COMPARE[ordered](a, b)


FLOAT_NAMES = [*COMPARE, *(f"{name}u" for name in COMPARE), "num", "nan"]


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_of_floats(name, kind):
    columns = (brains(A), brains(B)) if kind == "bf16" else (A, B)
    operands = "u16 u16" if kind == "bf16" else f"{kind} {kind}"
    got = lanes(SET.format(f"{name}.{kind}"), f"u32 {operands}", *columns)
    assert got.tolist() == [expected_of(name, a, b) for a, b in PAIRS]


def test_ftz_compares_subnormals_as_zeros():
    a, b = [1e-40, 1e-40, 1e-40, -1e-40], [0, 2e-40, 1, 0]
    kinds = "u32 f32 f32"
    assert lanes(SET.format("gt.f32"), kinds, a, b).tolist() == [1, 0, 0, 0]
    assert lanes(SET.format("gt.ftz.f32"), kinds, a, b).tolist() == [0, 0, 0, 0]
    assert lanes(SET.format("eq.ftz.f32"), kinds, a, b).tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", COMPARE)
def test_of_integers(name, kind):
    info = np.iinfo(TYPES[kind])
    a = [info.min, info.max, 1, info.max]
    b = [info.max, info.min, 1, 1]
    got = lanes(SET.format(f"{name}.{kind}"), f"u32 {kind} {kind}", a, b)
    assert got.tolist() == [COMPARE[name](x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(("name", "like"), [("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")])
def test_names_of_unsigned_comparisons(name, like):
    a, b = [2**32 - 1, 1, 5], [1, 2**32 - 1, 5]
    got = lanes(SET.format(f"{name}.u32"), "u32 u32 u32", a, b)
    assert got.tolist() == [COMPARE[like](x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("negated", ["", "!"])
@pytest.mark.parametrize(("name", "combine"), [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)])
def test_both_results_of_a_comparison_are_combined(name, combine, negated):
    """p of the comparison, q of its contrary, both with a third predicate."""
    code = f"""
        .reg .pred r;
        setp.ne.s32 r, c, 0;
        setp.lt.{name}.s32 p|q, a, b, {negated}r;
        selp.b32 t, 2, 0, q;
        selp.b32 d, 1, 0, p;
        or.b32 d, d, t;"""
    rows = [(a, 1, c) for a in (0, 2) for c in (0, 1)]
    expected = []
    for a, b, c in rows:
        third = bool(c) != bool(negated)
        expected.append(int(combine(a < b, third)) + 2 * int(combine(a >= b, third)))
    assert lanes(code, "u32 s32 s32 s32", *zip(*rows, strict=True)).tolist() == expected


def test_of_pairs_p_is_of_the_low_and_q_of_the_high_halves():
    low, high = np.float16(1).view(np.uint16), np.float16(2).view(np.uint16)
    a, b = int(high) << 16 | int(low), int(low) << 16 | int(low)
    code = "setp.{}.f16x2 p|q, a, b; selp.b32 d, 1, 0, p; selp.b32 t, 2, 0, q; or.b32 d, d, t;"
    assert lanes(code.format("eq"), "u32 u32 u32", [a], [b]).tolist() == [1]
    assert lanes(code.format("gt"), "u32 u32 u32", [a], [b]).tolist() == [2]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("and.pred p, p, q;", [0, 0, 0, 1]),
        ("or.pred p, p, q;", [0, 1, 1, 1]),
        ("xor.pred p, p, q;", [0, 1, 1, 0]),
        ("not.pred p, q;", [1, 0, 1, 0]),
        ("mov.pred p, q;", [0, 1, 0, 1]),
        ("mov.pred p, !q;", [1, 0, 1, 0]),
        ("mov.pred p, -1;", [1, 1, 1, 1]),
    ],
)
def test_logic_of_predicates(code, expected):
    whole = f"setp.ne.u32 p, a, 0; setp.ne.u32 q, b, 0; {code} selp.b32 d, 1, 0, p;"
    assert lanes(whole, "u32 u32 u32", [0, 0, 1, 1], [0, 1, 0, 1]).tolist() == expected


def test_a_guard_leaves_the_other_lanes_as_they_were():
    code = "setp.ne.u32 p, a, 0; mov.b32 d, 5; @p mov.b32 d, 6; @!p add.u32 d, d, 10;"
    assert lanes(code, "u32 u32", [0, 1, 0, 7]).tolist() == [15, 6, 15, 6]


def test_selp_takes_either():
    for kind in ("u16", "u32", "u64"):
        code = f"setp.ne.u32 p, a, 0; selp.b{kind[1:]} d, b, c, p;"
        assert lanes(code, f"{kind} u32 {kind} {kind}", [0, 1], [10, 11], [20, 21]).tolist() == [20, 11]
    code = "setp.ne.u32 p, a, 0; selp.b32 d, b, c, !p;"
    assert lanes(code, "u32 u32 u32 u32", [0, 1], [10, 11], [20, 21]).tolist() == [10, 21]
