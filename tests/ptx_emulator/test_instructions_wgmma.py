"""wgmma: operands in every layout, in registers, negated; the fences and waits that it needs."""

import numpy as np
import pytest
from ptx_emulator import wgmma
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import ORDERS, QUARTERS, brains, halves, quarters, run_ptx
from ptx_emulator.test_instructions_mma import fragment_a

BASE = 1024  # the address of shared memory's first byte
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)
DEPTHS = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
TRANSPOSES = {"bf16", "f16"}


def packed(values, kind):
    if kind == "tf32":
        return np.asarray(values, np.float32)
    if kind in QUARTERS:
        return quarters(values, kind)
    return brains(values.tolist()) if kind == "bf16" else halves(values)


class Product:
    """D = A B^T of small integers, whose every sum is exact."""

    def __init__(
        self,
        kind="bf16",
        columns=16,
        *,
        a_swizzle=3,
        b_swizzle=3,
        a_mn=False,
        b_mn=False,
        steps=1,
        in_registers=False,
        kind_b=None,
    ):
        rng = np.random.default_rng(columns + steps)
        self.kind, self.kind_b, self.columns, self.steps, self.in_registers = (
            kind,
            kind_b or kind,
            columns,
            steps,
            in_registers,
        )
        self.depth = DEPTHS[kind]
        most = 3 if kind == "e5m2" or kind_b == "e5m2" else 9
        self.a, self.b = (
            rng.integers(-most, most + 1, (rows, steps * self.depth)).astype(np.float32) for rows in (64, columns)
        )
        self.layouts = (a_swizzle, a_mn), (b_swizzle, b_mn)
        self.place()
        self.d = [f"%f{i}" for i in range(columns // 2)]

    def place(self):
        left, right = self.layouts
        self.left = wgmma.Operand(packed(self.a, self.kind), *left, BASE)
        self.right = wgmma.Operand(packed(self.b, self.kind_b), *right, BASE + len(self.left.data))

    def instruction(self, step=0, scale_d="1", negate=(1, 1)):
        left = "{%r10, %r11, %r12, %r13}" if self.in_registers else "%d10"
        transposed = [int(self.left.mn_major)] * (not self.in_registers) + [int(self.right.mn_major)]
        options = [*negate, *(transposed if self.kind in TRANSPOSES else [])]
        name = f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.depth}.f32.{self.kind}.{self.kind_b}"
        return f"""
            mov.b64 %d10, {self.left.descriptor(step * self.depth)};
            mov.b64 %d11, {self.right.descriptor(step * self.depth)};
            setp.ne.s32 %p4, {scale_d}, 0;
            {name} {wgmma.listed(self.d)}, {left}, %d11, %p4, {", ".join(map(str, options))};"""

    def run(self, body, initial=0.0, orders=ORDERS):
        """`[thread, register]` of D after `body`, from accumulators that are all `initial`."""
        warps = [fragment_a(self.a[16 * w : 16 * w + 16, : self.depth], self.kind) for w in range(4)]
        registers = np.concatenate(warps)
        out = np.zeros((128, self.columns // 2), np.float32)
        bits = np.float32(initial).view(np.uint32)
        text = wgmma.filled(0, self.left, BASE) + wgmma.filled(1, self.right, BASE)
        text += "fence.proxy.async.shared::cta; bar.sync 0;"
        text += "mad.wide.u32 %d0, %tid, 16, %a2; ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d0];"
        text += "".join(f"mov.b32 {name}, {bits};" for name in self.d)
        text += body + f"mad.wide.u32 %d0, %tid, {2 * self.columns}, %a3;"
        text += "".join(f"st.global.b32 [%d0+{4 * i}], {name};" for i, name in enumerate(self.d))
        shared = len(self.left.data) + len(self.right.data)
        run_ptx(text, self.left.data, self.right.data, registers, out, threads=128, shared=shared, orders=orders)
        return out

    def check(self, body, expected, initial=0.0):
        np.testing.assert_array_equal(self.run(body, initial), wgmma.fragment_d(expected))


def each_step(product):
    return FENCE + "".join(product.instruction(step) for step in range(product.steps)) + COMMIT + WAIT


@pytest.mark.parametrize("b_mn", [False, True], ids=["bk", "bn"])
@pytest.mark.parametrize("a_mn", [False, True], ids=["ak", "am"])
@pytest.mark.parametrize("b_swizzle", range(4))
@pytest.mark.parametrize("a_swizzle", range(4))
def test_layouts(a_swizzle, b_swizzle, a_mn, b_mn):
    product = Product("bf16", 64, a_swizzle=a_swizzle, b_swizzle=b_swizzle, a_mn=a_mn, b_mn=b_mn)
    product.check(each_step(product), product.a @ product.b.T)


@pytest.mark.parametrize("columns", [8, 16, 24, 128, 256])
@pytest.mark.parametrize("kind", DEPTHS)
def test_types_and_columns(kind, columns):
    product = Product(kind, columns)
    product.check(each_step(product), product.a @ product.b.T)


@pytest.mark.parametrize("b_swizzle", range(4))
@pytest.mark.parametrize("a_swizzle", range(4))
def test_layouts_of_bytes(a_swizzle, b_swizzle):
    product = Product("e4m3", 64, a_swizzle=a_swizzle, b_swizzle=b_swizzle)
    product.check(each_step(product), product.a @ product.b.T)


@pytest.mark.parametrize("in_registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize("kinds", [("e4m3", "e5m2"), ("e5m2", "e4m3")], ids="-".join)
def test_bytes_of_two_types(kinds, in_registers):
    """Each operand has numbers that the other type does not hold."""
    product = Product(kinds[0], 16, kind_b=kinds[1], in_registers=in_registers)
    own = {"e4m3": np.float32([1.125, 2.75, -13, 0]), "e5m2": np.float32([512, -1.75, 5, 0])}
    product.a, product.b = (
        np.random.default_rng(i).choice(own[kind], (rows, 32))
        for i, (kind, rows) in enumerate(zip(kinds, (64, 16), strict=True))
    )
    product.place()
    product.check(each_step(product), product.a @ product.b.T)


@pytest.mark.parametrize(("swizzle", "mn"), [(3, False), (2, False), (0, False), (3, True), (1, True), (0, True)])
def test_steps_advance_inside_a_layout(swizzle, mn):
    """K-major steps add bytes to the address, though it is swizzled."""
    steps = {3: 4, 2: 2}.get(swizzle, 3) if not mn else 3
    product = Product("f16", 32, a_swizzle=swizzle, b_swizzle=swizzle, a_mn=mn, b_mn=mn, steps=steps)
    product.check(each_step(product), product.a @ product.b.T)


@pytest.mark.parametrize("swizzle", range(4))
def test_steps_of_bytes_advance_inside_a_layout(swizzle):
    product = Product("e4m3", 32, a_swizzle=swizzle, b_swizzle=swizzle, steps={3: 4, 2: 2, 1: 1, 0: 3}[swizzle])
    product.check(each_step(product), product.a @ product.b.T)


@pytest.mark.parametrize("kind", DEPTHS)
def test_a_in_registers(kind):
    product = Product(kind, 16, in_registers=True)
    product.check(each_step(product), product.a @ product.b.T)


@pytest.mark.parametrize("negate", [(-1, 1), (1, -1), (-1, -1)], ids=["a", "b", "both"])
def test_operands_may_be_negated(negate):
    product = Product()
    sign = negate[0] * negate[1]
    product.check(FENCE + product.instruction(negate=negate) + COMMIT + WAIT, 5 + sign * (product.a @ product.b.T), 5.0)


def test_accumulators_are_added_to_or_not_even_read():
    product = Product()
    plain = product.a @ product.b.T
    product.check(FENCE + product.instruction() + COMMIT + WAIT, plain + 3, 3.0)
    product.check(FENCE + product.instruction(scale_d="0") + COMMIT + WAIT, plain, np.nan)


READ = "st.global.b32 [%a3], %f0;"
ENDINGS = {
    "no fence": ("{} " + COMMIT + WAIT, "FENCE: wgmma uses a register that was written since the last wgmma.fence"),
    "read before the wait": (FENCE + "{} " + COMMIT + READ + WAIT, "touches %f0, which a wgmma in flight uses"),
    "written before the wait": (
        FENCE + "{} " + COMMIT + "mov.b32 %f1, 0; " + WAIT,
        "touches %f1, which a wgmma in flight",
    ),
    "waits for too few": (
        FENCE + "{} " + COMMIT + "wgmma.wait_group.sync.aligned 1;",
        "touches %f0, which a wgmma in flight",
    ),
    "never committed": (FENCE + "{} " + WAIT, "touches %f0, which a wgmma in flight uses"),
    "operand overwritten": (
        FENCE + "{} " + COMMIT + "bar.sync 0; mov.u32 %r1, shared; st.shared.b32 [%r1], %tid; " + WAIT,
        "RACE in shared memory: write after read",
    ),
    "some lanes": (FENCE + "setp.lt.u32 %p5, %lane, 4; @%p5 " + COMMIT + WAIT, "lanes 0000000f only"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_nothing_orders_is_noticed(name):
    product = Product()
    body, message = ENDINGS[name]
    with pytest.raises(EmulationError, match=message):
        product.run(body.format(product.instruction()))


def test_a_in_registers_may_not_change_before_the_wait():
    product = Product(in_registers=True)
    body = FENCE + product.instruction() + COMMIT + "mov.b32 %r11, 0;" + WAIT
    with pytest.raises(EmulationError, match="touches %r11, which a wgmma in flight uses"):
        product.run(body)


def test_groups_end_in_order():
    product, other = Product(), Product()
    other.d = [f"%f{i + 100}" for i in range(8)]
    zero = "".join(f"mov.b32 {name}, 0;" for name in other.d)
    body = zero + FENCE + product.instruction() + COMMIT + other.instruction() + COMMIT
    first = "wgmma.wait_group.sync.aligned 1; add.f32 %f0, %f0, 0f00000000;"
    product.check(body + first + WAIT, product.a @ product.b.T)
    with pytest.raises(EmulationError, match="touches %f100"):
        product.run(body + first + "mov.b32 %f100, 0;" + WAIT)


THIRD_WARP = "shr.u32 %r20, %tid, 5; setp.eq.u32 %p5, %r20, 2;"
# Differences between the third warp of a group and the others.
DISAGREEMENTS = {
    "another order": (
        "@%p5 bra OTHER; {0} {1} bra.uni JOIN; OTHER: {1} {0} JOIN:",
        "another warp of the group has issued another one, or other descriptors",
    ),
    "another descriptor": (
        "mov.b64 %d20, {offset}; selp.b64 %d20, %d20, 0, %p5; {shifted}",
        "another warp of the group has issued another one, or other descriptors",
    ),
    "one less": (
        "selp.b32 %r21, 1, 2, %p5; EACH: {0} add.s32 %r21, %r21, -1; setp.gt.s32 %p6, %r21, 0; @%p6 bra EACH;",
        "the warps of warp group 0 have not issued the same number of wgmmas",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_the_warps_of_a_group_issue_the_same(name):
    product = Product(steps=2)
    body, message = DISAGREEMENTS[name]
    first, second = product.instruction(0), product.instruction(1)
    shifted = first.replace("setp.ne", "add.s64 %d11, %d11, %d20; setp.ne")
    with pytest.raises(EmulationError, match=message):
        product.run(THIRD_WARP + FENCE + body.format(first, second, offset=2, shifted=shifted) + COMMIT + WAIT)


def test_they_may_come_at_different_times():
    product = Product(steps=2)
    once = "mov.b32 %r22, 40; DELAY: add.s32 %r22, %r22, -1; setp.gt.s32 %p6, %r22, 0; @%p6 bra DELAY;"
    later = f"@!%p5 bra NOW; {once} NOW:"
    first, second = product.instruction(0), product.instruction(1)
    product.check(THIRD_WARP + FENCE + first + later + second + COMMIT + WAIT, product.a @ product.b.T)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mov.b64 %d11, ", f"mov.b64 %d11, {1 << 49}; // ", "base offset"),
        ("mov.b64 %d11, ", f"mov.b64 %d11, {wgmma.descriptor(1 << 17, 0, 0, 3)}; // ", "out of bounds"),
        ("k16", "k8", "wgmma type"),
        (".f32.bf16.bf16", ".f16.f16.f16", "wgmma types"),
        (".f32.bf16.bf16", ".s32.s8.s8", "wgmma types"),
        (".f32.bf16.bf16", ".f32.bf16.f16", "wgmma type"),
        ("k16.f32.bf16.bf16", "k32.f32.e4m3.e4m3", "wgmma operands"),
        ("k16.f32.bf16.bf16", "k16.f32.e4m3.e4m3", "wgmma type"),
    ],
    ids=["base_offset", "beyond", "depth", "f16_sums", "s8", "two_types", "transposed_bytes", "depth_of_bytes"],
)
def test_what_may_not_be_is_an_error_that_names_the_line(old, new, message):
    product = Product()
    body = FENCE + product.instruction() + COMMIT + WAIT
    with pytest.raises(EmulationError, match=rf"PTX line \d+(.|\n)*({message})"):
        product.run(body.replace(old, new))
