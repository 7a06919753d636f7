"""mma.sync of every shape and type, whose fragments are laid out here as the PTX ISA draws them."""

import numpy as np
import pytest
import torch
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import ORDERS, QUARTERS, brains, halves, quarters, run_ptx

LANE = np.arange(32)
BYTES = tuple(QUARTERS)
GROUP, INSIDE = LANE // 4, LANE % 4  # "groupID" and "threadID_in_group"


def pack(values, kind):
    """Registers: of halves two in each and of bytes four, the first one low; fp32's own bits for tf32."""
    if kind == "tf32":
        return np.asarray(values, np.float32).view(np.uint32)
    if kind in BYTES:
        return np.ascontiguousarray(quarters(values, kind)).view(np.uint32)
    pairs = (brains(values.tolist()) if kind == "bf16" else halves(values)).astype(np.uint32)
    return pairs[..., ::2] | pairs[..., 1::2] << 16


def fragment_a(a, kind):
    """`[lane, register]`: rows groupID and groupID + 8, columns in eights (fours of tf32, sixteens of bytes)."""
    depth = a.shape[1]
    if kind == "tf32":
        where = [(GROUP + 8 * (i % 2), INSIDE + 4 * (i // 2)) for i in range(depth // 2)]
    elif kind in BYTES:
        where = [(GROUP + 8 * (i // 4 % 2), 4 * INSIDE + i % 4 + 16 * (i // 8)) for i in range(depth // 2)]
    else:
        where = [(GROUP + 8 * (i // 2 % 2), 2 * INSIDE + i % 2 + 8 * (i // 4)) for i in range(depth // 2)]
    return pack(np.stack([a[row, column] for row, column in where], 1), kind)


def fragment_b(b, kind):
    depth = b.shape[0]
    if kind == "tf32":
        where = [INSIDE + 4 * i for i in range(depth // 4)]
    elif kind in BYTES:
        where = [4 * INSIDE + i % 4 + 16 * (i // 4) for i in range(depth // 4)]
    else:
        where = [2 * INSIDE + i % 2 + 8 * (i // 2) for i in range(depth // 4)]
    return pack(np.stack([b[row, GROUP] for row in where], 1), kind)


def fragment_c(c):
    return np.stack([c[GROUP + 8 * (i // 2), 2 * INSIDE + i % 2] for i in range(4)], 1)


SHAPES = [("bf16", 16), ("bf16", 8), ("f16", 16), ("f16", 8), ("tf32", 8), ("tf32", 4)]


SCALED = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.{}.{}.f32.ue8m0"


def product(a, b, c, kind, depth, target="sm_80", kind_b=None, scales=(), bytes_of_scales=(0, 0), orders=ORDERS):
    """The instruction's result for these matrices, as `[lane, 4]`. `scales`: for A and B, a word of each lane."""
    kind_b = kind_b or kind
    operands = [fragment_a(a, kind), fragment_b(b, kind_b), fragment_c(c).astype(np.float32)]
    operands += [words[:, None] for words in scales]
    names, body = iter(range(100)), ""
    registers = []
    for i, operand in enumerate(operands):
        count = operand.shape[1]
        registers.append([f"%r{next(names) + 10}" for _ in range(count)])
        body += f"mad.wide.u32 %d0, %lane, {4 * count}, %a{i};"
        body += "".join(f"ld.global.b32 {name}, [%d0+{4 * j}];" for j, name in enumerate(registers[-1]))
    lists = ["{" + ", ".join(names) + "}" for names in registers[:3]]
    lists += [f"{word}, {{{byte}, 0}}" for (word,), byte in zip(registers[3:], bytes_of_scales, strict=False)]
    name = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind_b}.f32"
    if len(scales):
        name = SCALED.format(kind, kind_b)
    body += f"{name} {{%f0, %f1, %f2, %f3}}, {', '.join(lists)};"
    body += f"mad.wide.u32 %d0, %lane, 16, %a{len(operands)}; st.global.v4.b32 [%d0], {{%f0, %f1, %f2, %f3}};"
    out = np.zeros((32, 4), np.float32)
    run_ptx(body, *operands, out, target=target, orders=orders)
    return out


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("kind", "depth"), SHAPES, ids=[f"{kind}_k{depth}" for kind, depth in SHAPES])
def test_product(kind, depth, target):
    rng = np.random.default_rng(depth)
    a, b, c = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((16, depth), (depth, 8), (16, 8)))
    np.testing.assert_array_equal(product(a, b, c, kind, depth, target), fragment_c(a @ b + c))


@pytest.mark.parametrize("depth", [16, 32])
@pytest.mark.parametrize("kind_b", BYTES)
@pytest.mark.parametrize("kind", BYTES)
def test_product_of_bytes(kind, kind_b, depth):
    """Numbers that both types hold; every sum is exact."""
    rng = np.random.default_rng(depth)
    a, b = (
        rng.choice([-1, 1], shape) * rng.integers(4, 8, shape) * 2.0 ** rng.integers(*limits, shape)
        for shape, limits in (((16, depth), (-8, 0)), ((depth, 8), (-4, 4)))
    )
    c = rng.integers(-9, 10, (16, 8)).astype(np.float32)
    np.testing.assert_array_equal(product(a, b, c, kind, depth, "sm_90", kind_b), fragment_c(a @ b + c))


@pytest.mark.parametrize("depth", [16, 32])
def test_each_element_of_bytes_has_its_place(depth):
    """One element of A and of B is not zero, each in all of its places; powers of two name it."""
    for k in range(depth):
        a, b = np.zeros((16, depth), np.float32), np.zeros((depth, 8), np.float32)
        a[:, k], b[k] = 2.0 ** (np.arange(16) - 8), 2.0 ** (8 - np.arange(8))
        got = product(a, b, np.zeros((16, 8)), "e5m2", depth, "sm_90")
        np.testing.assert_array_equal(got, fragment_c(np.outer(a[:, k], b[k])))


@pytest.mark.parametrize("kind", BYTES)
def test_every_byte_that_is_a_number(kind):
    """A holds each byte twice; B picks 8 columns of it at a time."""
    codes = torch.arange(512, dtype=torch.int32).to(torch.uint8).reshape(16, 32)
    values = codes.view(QUARTERS[kind]).float().numpy()
    a = np.where(np.isfinite(values), values, 0)
    for first in range(0, 32, 8):
        b = np.zeros((32, 8), np.float32)
        b[first : first + 8] = np.eye(8)
        got = product(a, b, np.zeros((16, 8)), kind, 32, "sm_90")
        np.testing.assert_array_equal(got, fragment_c(a[:, first : first + 8]))


def test_bytes_that_are_not_numbers():
    a, b, c = np.zeros((16, 32), np.float32), np.ones((32, 8), np.float32), np.zeros((16, 8))
    a[3, 7], a[5, 9] = np.inf, np.nan
    got = product(a, b, c, "e5m2", 32, "sm_90")
    expected = np.zeros((16, 8))
    expected[3], expected[5] = np.inf, np.nan
    np.testing.assert_array_equal(got, fragment_c(expected))


@pytest.mark.parametrize("bytes_of_scales", [(0, 0), (1, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("kind_b", BYTES)
@pytest.mark.parametrize("kind", BYTES)
def test_scaled_product(kind, kind_b, bytes_of_scales):
    """Lanes 0 and 1 of every four have factors of rows of A, and lane 0 that of a column of B; all others have NaN."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((16, 32), (32, 8)))
    c = rng.integers(-9, 10, (16, 8)).astype(np.float32)
    of_rows, of_columns = np.arange(16) - 7, np.arange(8)[::-1] - 3
    words = np.full((2, 32, 4), 0xFF, np.uint8)
    words[0, 0::4, bytes_of_scales[0]], words[0, 1::4, bytes_of_scales[0]] = 127 + of_rows[:8], 127 + of_rows[8:]
    words[1, 0::4, bytes_of_scales[1]] = 127 + of_columns
    scales = words.view(np.uint32)[..., 0]
    expected = (2.0 ** of_rows[:, None] * a) @ (b * 2.0**of_columns) + c
    got = product(a, b, c, kind, 32, "sm_120", kind_b, scales, bytes_of_scales)
    np.testing.assert_array_equal(got, fragment_c(expected))


def test_scales_that_are_not_numbers():
    """E8M0 has a NaN, and 2^-127 is subnormal in fp32."""
    ones, c = np.ones((16, 32), np.float32), np.zeros((16, 8))
    words = np.full((2, 32), 0x7F7F7F7F, np.uint32)
    words[0, 4], words[0, 9] = 0xFF, 0  # row 1; row 2 + 8
    expected = np.full((16, 8), 32.0)
    expected[1], expected[10] = np.nan, 2.0**-122
    got = product(ones, ones.T[:, :8], c, "e4m3", 32, "sm_120", None, words)
    np.testing.assert_array_equal(got, fragment_c(expected))


def test_sums_are_kept_in_fp32():
    a, b = np.full((16, 16), 2.0**-12, np.float32), np.full((16, 8), 2.0**-8, np.float32)
    got = product(a, b, np.ones((16, 8), np.float32), "f16", 16)
    assert (got == 1 + 2**-16).all()


def test_tf32_ignores_thirteen_bits():
    a, b, c = np.full((16, 8), 1 + 2.0**-10 + 2.0**-11, np.float32), np.eye(8, dtype=np.float32), np.zeros((16, 8))
    assert (product(a, b, c, "tf32", 8) == 1 + 2**-10).all()


SCALES_AT = (
    " {{%r1, %r2, %r3, %r4}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r1, %r2, %r3, %r4}}, %r7, {{{}}}, %r8, {{0, 0}};"
)


@pytest.mark.parametrize(
    "line",
    [
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7, %r8};",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, "
        "{%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r5}, "
        "{%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, "
        "{%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k8.row.col.f32.e4m3.e4m3.f32 {%r1, %r2, %r3, %r4}, {%r1}, {%r5}, {%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k16.row.col.f32.e4m3.f16.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r5}, "
        "{%r1, %r2, %r3, %r4};",
        SCALED.format("bf16", "bf16") + SCALES_AT.format("0, 0"),
        SCALED.format("e4m3", "e4m3").replace("1X", "2X") + SCALES_AT.format("0, 0"),
        SCALED.format("e4m3", "e4m3") + SCALES_AT.format("0, 1"),
        SCALED.format("e4m3", "e4m3") + SCALES_AT.format("4, 0"),
        SCALED.format("e4m3", "e4m3") + SCALES_AT.format("%r1, 0"),
    ],
    ids=[
        *("f16_sums", "s8", "registers", "f16_k32", "e4m3_k8", "e4m3_f16"),
        *("scaled_bf16", "scales_of_16", "lane_of_scales", "byte_of_scales", "variable_byte_of_scales"),
    ],
)
def test_what_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+: mma"):
        run_ptx(line)
