"""tcgen05.mma of 8-bit floats: kind::f8f6f4, and kind::mxf8f6f4 with scale factors."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import quarters, run_ptx
from ptx_emulator.scaled import BARRIER, DEPTH, ROWS, TYPES, ScaledProduct
from ptx_emulator.test_instructions_tcgen05 import Steps

PAIRS = [(a, b) for a in TYPES for b in TYPES]


def operands(kinds):
    """Numbers of both types, and their bytes."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (rows, DEPTH)) * 2.0 ** rng.integers(-3, 3, (rows, DEPTH)) for rows in (ROWS, 16))
    return a, b, quarters(a, kinds[0]), quarters(b, kinds[1])


def steps_of(kinds, **more):
    return Steps(kind="f8f6f4", a=TYPES[kinds[0]], b=TYPES[kinds[1]], **more)


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_types_without_factors(kinds):
    a, b, *packed = operands(kinds)
    np.testing.assert_array_equal(steps_of(kinds).run(*packed), 1 + a @ b.T)


def test_half_of_the_rows():
    a, b, *packed = operands(PAIRS[0])
    expected = np.ones((ROWS, 16))
    expected[np.arange(ROWS) % 32 < 16] += a[:64] @ b.T
    np.testing.assert_array_equal(steps_of(PAIRS[0], m=64).run(*packed), expected)


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_the_left_operand_may_lie_in_tensor_memory(kinds):
    """Four bytes a column, the first the lowest one."""
    a, b, *packed = operands(kinds)
    steps = steps_of(kinds, columns=64)
    listed = ", ".join(f"%r{20 + i}" for i in range(8))
    words = "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d5]; ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%d5+16];"
    steps.fill += f"{words} tcgen05.st.sync.aligned.32x32b.x8.b32 [%r5+32], {{{listed}}};"
    steps.mma = "@%p2 tcgen05.mma.cta_group::1.kind::f8f6f4 [%r4], [%r4+32], %d10, %r9, %p4;"
    np.testing.assert_array_equal(steps.run(*packed), 1 + a @ b.T)
    steps.mma = steps.mma.replace("[%r4+32]", "[%r4+40]")
    with pytest.raises(EmulationError, match="UNWRITTEN: an operand in tensor memory"):
        steps.run(*packed)


@pytest.mark.parametrize("b_mn", [False, True], ids=["bk", "bn"])
@pytest.mark.parametrize("a_mn", [False, True], ids=["ak", "am"])
@pytest.mark.parametrize("swizzles", [(3, 3), (2, 1), (1, 0), (0, 2)], ids=str)
def test_layouts(swizzles, a_mn, b_mn):
    """Bytes may be MN-major, too: a row of A is a column of the image in shared memory."""
    steps = 1 if 1 in swizzles else 2  # a swizzle of 32 bytes has one step along K
    ScaledProduct(64, steps, swizzles=swizzles, mn=(a_mn, b_mn)).check()


@pytest.mark.parametrize("n", [16, 48, 128, 144, 256])
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_types_and_columns(kinds, n):
    ScaledProduct(n, kinds=kinds).check()


def test_four_steps_use_four_bytes_of_a_word():
    ScaledProduct(80, 4).check()


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("varied", ["a", "b"])
def test_each_factor_belongs_to_one_row_and_one_step(varied, k):
    """No two factors of one step are equal; D has one step, so that every product is exact."""
    n = 208
    rng = np.random.default_rng(k)
    a, b = np.full((ROWS, 4), 100), np.full((n, 4), 100)  # another byte would give 2^100
    a[:, k] = rng.permutation(ROWS) - ROWS // 2 if varied == "a" else 3
    b[:, k] = rng.permutation(n) - n // 2 if varied == "b" else -2
    product = ScaledProduct(n, 4, factors=(a, b))
    product.mma = product.multiply(k).replace(f"%p4, {k}, 0", "%p4, 0, 0")
    product.a[:, : k * DEPTH] = product.a[:, (k + 1) * DEPTH :] = 0
    product.check()


def test_the_factors_of_a_and_b_may_be_different_bytes():
    product = ScaledProduct(48, 4)
    a, b = (exponents[:, which] for exponents, which in zip(product.factors, (3, 1), strict=True))
    product.mma = product.multiply(0, factor=(3, 1))
    first = product.a[:, :DEPTH].astype(np.float64) @ product.b[:, :DEPTH].astype(np.float64).T
    np.testing.assert_array_equal(product.run(), first * 2.0 ** (a[:, None] + b))


def test_factors_reach_from_the_least_to_the_largest():
    """Their product may be far out of range of fp32 where the result is not."""
    a, b = np.full((ROWS, 1), -127), np.full((16, 1), 127)
    a[1], b[1], b[2] = 127, -127, 128
    product = ScaledProduct(16, factors=(a, b))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = product.expected()
        expected[:, 2] = np.nan  # 0xff
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(product.run(), expected)


def test_scaled_operands_may_be_negated_and_added_to():
    product = ScaledProduct(16)
    first, more = product.multiply(0), product.multiply(0).replace("%p4, 0, 0", "%p4, 1, 0")
    bits = int(first.split("%r9, ")[1].split(";")[0])
    product.mma = first + 2 * more.replace(f"%r9, {bits};", f"%r9, {bits | 1 << 13};")
    np.testing.assert_array_equal(product.run(), -product.expected())


def test_a_scaled_left_operand_may_lie_in_tensor_memory():
    product = ScaledProduct(48)
    words = ", ".join(f"%r{20 + i}" for i in range(8))
    product.prepare = f"""
        mad.wide.u32 %d3, %tid, {DEPTH}, %a4;
        ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d3]; ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%d3+16];
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r5+128], {{{words}}};
        tcgen05.wait::st.sync.aligned; {BARRIER}"""
    product.mma = product.multiply(0, a="[%r4+128]")
    product.check()


FIELDS = {
    "reserved 3": (1 << 3, "reserved bits"),
    "reserved 6": (1 << 6, "reserved bits"),
    "reserved 24": (1 << 24, "reserved bits"),
    "reserved 31": (1 << 31, "reserved bits"),
    "type of factors": (1 << 23, "scale factors other than UE8M0"),
    "type of A": (3 << 7, "types other than e4m3 and e5m2"),
    "type of B": (5 << 10, "types other than e4m3 and e5m2"),
    "sparse": (1 << 2, "sparse"),
    "M": (3 << 27, "M 256"),
    "N": (1 << 17, "N 56 with M 128"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_scaled_descriptor_that_may_not_be_is_an_error_that_names_the_line(name):
    bits, message = FIELDS[name]
    product = ScaledProduct()
    plain = int(product.mma.split("%r9, ")[1].split(";")[0])
    product.mma = product.mma.replace(f"%r9, {plain};", f"%r9, {plain ^ bits};")
    with pytest.raises(EmulationError, match=rf"PTX line \d+: .*tcgen05.mma(.|\n)*descriptor(.|\n)*{message}"):
        product.run()


@pytest.mark.parametrize(
    ("bits", "message"),
    [(1 << 4, "sums other than fp32"), (3 << 7, "types other than"), (1 << 23, "reserved"), (1 << 29, "reserved")],
    ids=["sums", "type", "reserved_23", "reserved_29"],
)
def test_a_descriptor_without_factors_that_may_not_be_is_an_error(bits, message):
    steps = steps_of(PAIRS[0])
    steps.instruction ^= bits
    with pytest.raises(EmulationError, match=rf"PTX line \d+: .*tcgen05.mma(.|\n)*descriptor(.|\n)*{message}"):
        steps.run()


def test_factors_lie_in_all_lanes_of_allocated_columns():
    product = ScaledProduct()
    product.mma = product.mma.replace("@%p2", "add.u32 %r8, %r8, 65536; @%p2")
    with pytest.raises(EmulationError, match="scale factors from lane 1 on"):
        product.run()
    product.mma = product.mma.replace("%r8, 65536", "%r8, 186")  # columns 254 and 255, then 255 and 256
    with pytest.raises(EmulationError, match="UNWRITTEN"):
        product.run()
    product.mma = product.mma.replace("%r8, 186", "%r8, 187")
    with pytest.raises(EmulationError, match=r"not allocated|out of bounds"):
        product.run()


@pytest.mark.parametrize(
    "line",
    [
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4 [%r4], %d8, %d10, %r9, %p4;",
        "tcgen05.mma.cta_group::1.kind::f8f6f4.block_scale [%r4], %d8, %d10, %r9, [%r5], [%r6], %p4;",
        "tcgen05.mma.cta_group::1.kind::f8f6f4.scale_vec::1X [%r4], %d8, %d10, %r9, %p4;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::2X [%r4], %d8, %d10, %r9, [%r5], [%r6], %p4;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r4], %d8, %d10, %r9, [%r5], [%r6], %p4, 1;",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r4], %d8, %d10, %r9, [%r5], [%r6], %p4;",
        "tcgen05.mma.cta_group::1 [%r4], %d8, %d10, %r9, %p4;",
    ],
)
def test_what_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*tcgen05"):
        run_ptx(line, target="sm_100")
