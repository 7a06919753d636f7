"""tcgen05: tensor memory, its MMAs, and the waits that they need; layouts as in the PTX ISA's chapter on it."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import ORDERS, brains, halves, run_ptx

EARLY, LATE, _ = ORDERS
BASE = 1024  # the address of shared memory's first byte
A, B, TABLE, BAR = 0, 4096, 8192, 8200  # where the operands lie, the address of tensor memory, an mbarrier
SHARED = 8320
ROWS, DEPTH = 128, 16
VERSION = 1 << 46


def descriptor(start, leading, stride, rest=VERSION):
    return (BASE + start) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | rest


def instruction_descriptor(m=128, n=16, d=1, a=1, b=1, rest=0):
    """`a` and `b`: types 0 (fp16), 1 (bf16) or 2 (tf32); D is fp32, or fp16 if `d` is 0."""
    return d << 4 | a << 7 | b << 10 | n // 8 << 17 | m // 16 << 24 | rest


class Steps:
    """A product of 128 (or 64) rows and 16 columns in its steps, any of which a test may replace.

    Each row of A and of B is a line of 32 bytes of `%a0` and `%a1`; it is stored K-major without swizzle: 8 rows of 16
    bytes, then the next 8 (stride 128); the second half of K lies behind all rows of the first. D starts as 1.
    """

    def __init__(self, columns=32, m=128, scale="", lanes="", negated="", kind="f16", **fields):
        listed = "{" + ", ".join(f"%f{i}" for i in range(16)) + "}"
        self.alloc = f"@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [shared+{TABLE}], {columns};"
        self.relinquish = "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
        self.init = f"@%p2 mbarrier.init.shared::cta.b64 [shared+{BAR}], 1;"
        self.proxy = "fence.proxy.async.shared::cta;"
        self.meet = "bar.sync 0;"
        self.fill = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r5], {listed};"
        self.filled = "tcgen05.wait::st.sync.aligned;"
        self.ready = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"
        self.a = descriptor(A, 2048, 128)
        self.b = descriptor(B, 256, 128)
        self.instruction = instruction_descriptor(m, **fields)
        self.mma = f"@%p2 tcgen05.mma.cta_group::1.kind::{kind} [%r4], %d8, %d10, %r9{lanes}, {negated}%p4{scale};"
        bar = f"[shared+{BAR}]"
        self.commit = f"@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 {bar};"
        self.wait = f"AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p5, {bar}, 0; @!%p5 bra AGAIN;"
        self.load = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {listed}, [%r5];"
        self.loaded = "tcgen05.wait::ld.sync.aligned;"
        self.end = "bar.sync 0;"
        self.dealloc = f"@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, {columns};"

    def text(self):
        return f"""
            setp.lt.u32 %p1, %tid, 32;
            setp.eq.u32 %p2, %tid, 0;
            {self.alloc} {self.relinquish} {self.init}
            mul.wide.u32 %d4, %tid, 32;
            add.u64 %d5, %a0, %d4;
            ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d5];
            ld.global.v4.b32 {{%r14, %r15, %r16, %r17}}, [%d5+16];
            mad.lo.u32 %r3, %tid, 16, {BASE};
            st.shared.v4.b32 [%r3], {{%r10, %r11, %r12, %r13}};
            st.shared.v4.b32 [%r3+2048], {{%r14, %r15, %r16, %r17}};
            setp.lt.u32 %p3, %tid, 16;
            add.u64 %d6, %a1, %d4;
            @%p3 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d6];
            @%p3 ld.global.v4.b32 {{%r14, %r15, %r16, %r17}}, [%d6+16];
            @%p3 st.shared.v4.b32 [%r3+{B}], {{%r10, %r11, %r12, %r13}};
            @%p3 st.shared.v4.b32 [%r3+{B + 256}], {{%r14, %r15, %r16, %r17}};
            {self.proxy} {self.meet}
            ld.shared.b32 %r4, [shared+{TABLE}];
            and.b32 %r5, %tid, 96;
            shl.b32 %r5, %r5, 16;
            add.u32 %r5, %r5, %r4;
            {"".join(f"mov.b32 %f{i}, 0f3F800000;" for i in range(16))}
            {self.fill} {self.filled} {self.ready}
            mov.b64 %d8, {self.a};
            mov.b64 %d10, {self.b};
            mov.b32 %r9, {self.instruction};
            mov.pred %p4, -1;
            {self.mma} {self.commit} {self.wait}
            tcgen05.fence::after_thread_sync;
            {self.load} {self.loaded}
            mad.wide.u32 %d11, %tid, 64, %a2;
            {"".join(f"st.global.b32 [%d11+{4 * i}], %f{i};" for i in range(16))}
            {self.end} {self.dealloc}"""

    def run(self, a=None, b=None, orders=ORDERS, threads=128, allowed=None):
        """`[lane, column]` of D. Elements of A and B have any 16 bits; with 32 bits, rows have 8."""
        rng = np.random.default_rng(0)
        a = brains(rng.integers(-9, 10, (ROWS, DEPTH)).tolist()) if a is None else a
        b = brains(rng.integers(-9, 10, (16, DEPTH)).tolist()) if b is None else b
        out = np.zeros((ROWS, 16), np.float32)
        run_ptx(self.text(), a, b, out, target="sm_100", threads=threads, shared=SHARED, orders=orders, allowed=allowed)
        return out


def operands(pack=brains, depth=DEPTH):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-9, 10, (rows, depth)).astype(np.float32) for rows in (ROWS, 16))
    return a, b, pack(a.tolist()), pack(b.tolist())


def test_a_product_is_added_to_tensor_memory():
    a, b, *packed = operands()
    np.testing.assert_array_equal(Steps().run(*packed), 1 + a @ b.T)


def test_it_may_be_written_without_being_read():
    a, b, *packed = operands()
    np.testing.assert_array_equal(Steps(negated="!").run(*packed), a @ b.T)


def test_half_of_the_rows_lie_in_half_of_the_lanes():
    """ "M = 64": 16 rows in the lower half of the lanes of each warp."""
    a, b, *packed = operands()
    expected = np.ones((ROWS, 16), np.float32)
    expected[np.arange(ROWS) % 32 < 16] += a[:64] @ b.T
    np.testing.assert_array_equal(Steps(m=64).run(*packed), expected)


@pytest.mark.parametrize(
    ("pack", "fields"),
    [
        (halves, {"a": 0, "b": 0}),
        (lambda rows: np.asarray(rows, np.float32), {"a": 2, "b": 2, "kind": "tf32"}),
    ],
    ids=["f16", "tf32"],
)
def test_types(pack, fields):
    a, b, *packed = operands(pack, 8 if fields["a"] == 2 else DEPTH)
    np.testing.assert_array_equal(Steps(**fields).run(*packed), 1 + a @ b.T)


def test_sums_may_be_halves():
    """Each fp16 accumulator takes a column; the initial 1 in fp32 has 0 in its lower 16 bits."""
    a, b, *packed = operands(halves)
    got = Steps(a=0, b=0, d=0).run(*packed)
    np.testing.assert_array_equal(got.view(np.uint32), halves((a @ b.T).ravel()).reshape(ROWS, 16))


@pytest.mark.parametrize(("bit", "sign"), [(13, -1), (14, -1)], ids=["a", "b"])
def test_operands_may_be_negated(bit, sign):
    a, b, *packed = operands()
    np.testing.assert_array_equal(Steps(rest=1 << bit).run(*packed), 1 + sign * (a @ b.T))


def test_what_is_added_to_may_be_scaled():
    a, b, *packed = operands()
    np.testing.assert_array_equal(Steps(scale=", 3").run(*packed), 2**-3 + a @ b.T)


def test_lanes_may_be_left_out():
    a, b, *packed = operands()
    got = Steps(lanes=", {0x0000F0F1, 0x11, 0, 0x80000000}").run(*packed)
    out = [0, 4, 5, 6, 7, 12, 13, 14, 15, 32, 36, 127]
    expected = 1 + a @ b.T
    expected[out] = 1
    np.testing.assert_array_equal(got, expected)


def test_the_left_operand_may_lie_in_tensor_memory():
    """Two halves a column, the first the lower one."""
    a, b, *packed = operands()
    steps = Steps(columns=64)
    listed = ", ".join(f"%r{20 + i}" for i in range(8))
    words = "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d5]; ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%d5+16];"
    steps.fill += f"{words} tcgen05.st.sync.aligned.32x32b.x8.b32 [%r5+32], {{{listed}}};"
    steps.mma = "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r4], [%r4+32], %d10, %r9, %p4;"
    np.testing.assert_array_equal(steps.run(*packed), 1 + a @ b.T)


def test_a_commit_may_have_64_bits_of_an_address():
    """An address of shared memory, as Triton 3.6 writes it."""
    a, b, *packed = operands()
    steps = Steps()
    steps.commit = f"""mov.b32 %r8, {BASE + BAR}; cvt.u64.u32 %d9, %r8;
        @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%d9];"""
    np.testing.assert_array_equal(steps.run(*packed), 1 + a @ b.T)
    steps.commit = steps.commit.replace("mov.b32", "add.u32").replace(f"{BASE + BAR}", f"%r4, {BASE + BAR + 8}")
    with pytest.raises(EmulationError, match=r"tcgen05\.commit"):
        steps.run(*packed)


def test_products_are_done_in_their_order():
    a, b, *packed = operands()
    steps = Steps()
    steps.mma = steps.mma + steps.mma.replace("%p4;", "%p4, 1;") + steps.mma
    np.testing.assert_array_equal(steps.run(*packed), (1 + a @ b.T) / 2 + 2 * (a @ b.T))


# Mistakes in the steps of a product, and the errors that they give; `{}` is the right step.
MISTAKES = {
    "no wait for stores": ({"filled": ""}, "RACE in tensor memory: write after write"),
    "no barrier after them": ({"ready": ""}, "RACE in tensor memory: write after write"),
    "no fence of operands": ({"proxy": ""}, "PROXY: the async proxy reads"),
    "no barrier after them either": ({"meet": "bar.warp.sync -1;"}, "RACE"),
    "no commit": ({"commit": ""}, "Deadlock"),
    "no wait for it": ({"wait": ""}, "RACE in tensor memory: read after write"),
    "loads before the wait for stores": (
        {"filled": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r70}}, [%r5]; {}"},
        "RACE in tensor memory: read after write",
    ),
    "loads that nobody waits for": ({"load": "{} add.f32 %f0, %f0, %f1;", "loaded": ""}, "RACE in tensor memory"),
    "the address taken for zero": (
        {"mma": "mov.b32 %r4, 0; {}", "dealloc": f"ld.shared.b32 %r4, [shared+{TABLE}]; {{}}"},
        "column 0 is not allocated",
    ),
    "never given back": ({"dealloc": ""}, "ends with 32 columns of tensor memory allocated"),
    "given back too early": ({"mma": "{}" + Steps().dealloc}, "RACE in tensor memory|not allocated"),
    "given back in part": ({"dealloc": Steps().dealloc.replace("32;", "64;")}, "not what was allocated"),
    "alloc after relinquish": ({"relinquish": "{}" + Steps().alloc}, "alloc after relinquish_alloc_permit"),
    "alloc of more": ({"relinquish": Steps(64).alloc}, "alloc of 64 columns after one of 32"),
    "alloc of too many": ({"relinquish": Steps().alloc * 16}, "waits for ever"),
    "alloc of 48": ({"alloc": Steps(48).alloc}, "alloc of 48 columns"),
    "alloc of 16": ({"alloc": Steps(16).alloc}, "alloc of 16 columns"),
    "lanes of another warp": (
        {"load": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%f0}}, [%r4]; {}"},
        "lanes from 0 on, but warp [123] reaches",
    ),
    "columns of nobody": (
        {"load": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%f0}}, [%r5+40]; {}"},
        "not allocated|out of bounds",
    ),
    "beyond the last column": ({"mma": "add.u32 %r4, %r4, 24; {}"}, "out of bounds|not allocated"),
    "operands overwritten": (
        {"commit": "{} @%p2 st.shared.b32 [%r3], %r3;"},
        "RACE in shared memory: write after read",
    ),
    "mbarrier of nobody": ({"init": ""}, f"no mbarrier at shared offset {BAR}"),
    "D at lane 32": ({"mma": "add.u32 %r4, %r4, 2097152; {}"}, "D in tensor memory from lane 32 on with M 128"),
}


def with_mistake(name):
    steps = Steps()
    for step, text in MISTAKES[name][0].items():
        setattr(steps, step, text.format(getattr(steps, step)))
    return steps


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name):
    with pytest.raises(EmulationError, match=MISTAKES[name][1]):
        with_mistake(name).run()


DESCRIPTORS = {
    "no version": ("a", VERSION, "bits 46-48 are not 1"),
    "reserved": ("a", 1 << 15, "reserved bits"),
    "base offset": ("b", 1 << 49, "base offset"),
    "absolute offset": ("b", 1 << 52, "absolute leading dimension"),
    "swizzle": ("a", 3 << 61, "swizzle"),
    "atoms of 32": ("a", 1 << 61, "atoms of 32: not implemented"),
    "sparse": ("instruction", 1 << 2, "sparse"),
    "type of A": ("instruction", 1 << 8, "types of kind::f16"),
    "type of D": ("instruction", 1 << 4, "types of kind::f16"),
    "M": ("instruction", 4 << 24, "M 192"),
    "N": ("instruction", 1 << 17, "N 24 with M 128"),
    "no N": ("instruction", 2 << 17, "N 0 with M 128"),
    "shift": ("instruction", 1 << 30, "reserved bits"),
}


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_a_descriptor_that_may_not_be_is_an_error_that_names_the_line(name):
    field, bits, message = DESCRIPTORS[name]
    steps = Steps()
    setattr(steps, field, getattr(steps, field) ^ bits)
    with pytest.raises(EmulationError, match=rf"PTX line \d+: .*tcgen05.mma(.|\n)*descriptor(.|\n)*{message}"):
        steps.run()


@pytest.mark.parametrize(
    ("field", "bit"), [("a", 33), ("a", 17), ("a", 0), ("b", 33), ("b", 17), ("instruction", 15), ("instruction", 10)]
)
def test_another_descriptor_gives_another_result(field, bit):
    a, b, *packed = operands()
    steps = Steps()
    setattr(steps, field, getattr(steps, field) ^ 1 << bit)
    with pytest.raises((EmulationError, AssertionError)):
        np.testing.assert_array_equal(steps.run(*packed), 1 + a @ b.T)


def where(shape, k, thread):
    """Lane and column of register k, by the figures of "Data Movement Shape"."""
    row, of_four = thread // 4, thread % 4
    return {
        "32x32b": (thread, k),
        "16x64b": (row + 8 * (of_four % 2), 2 * k + of_four // 2),
        "16x128b": (row + 8 * (k % 2), 4 * (k // 2) + of_four),
        "16x256b": (row + 8 * (k // 2 % 2), 8 * (k // 4) + 2 * of_four + k % 2),
    }[shape]


def moved(code, registers):
    """Registers of 128 threads after `code`; before that, each thread stored its numbers in its lane."""
    out = np.zeros((128, registers), np.uint32)
    head = f"""
        setp.lt.u32 %p1, %tid, 32;
        {Steps().alloc}
        bar.sync 0;
        ld.shared.b32 %r4, [shared+{TABLE}];
        and.b32 %r5, %tid, 96;
        shl.b32 %r5, %r5, 16;
        add.u32 %r5, %r5, %r4;
        mul.lo.u32 %r6, %tid, 1000;
        {"".join(f"add.u32 %f{i}, %r6, {i};" for i in range(32))}
        tcgen05.st.sync.aligned.32x32b.x32.b32 [%r5], {{{", ".join(f"%f{i}" for i in range(32))}}};
        tcgen05.wait::st.sync.aligned;"""
    tail = f"""
        tcgen05.wait::ld.sync.aligned;
        mad.wide.u32 %d1, %tid, {4 * registers}, %a0;
        {"".join(f"st.global.b32 [%d1+{4 * i}], %f{i};" for i in range(registers))}
        bar.sync 0;
        {Steps().dealloc}"""
    run_ptx(head + code + tail, out, target="sm_100", threads=128, shared=SHARED)
    return out


def listed(count):
    return "{" + ", ".join(f"%f{i}" for i in range(count)) + "}"


LANE_NUMBERS = 1000 * np.arange(128)[:, None] + np.arange(32)
SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}  # registers of .x1


@pytest.mark.parametrize(
    ("shape", "upper"), [("32x32b", 0), *((shape, upper) for shape in list(SHAPES)[1:] for upper in (0, 16))]
)
def test_loads(shape, upper):
    count = 2 * SHAPES[shape]
    got = moved(f"tcgen05.ld.sync.aligned.{shape}.x2.b32 {listed(count)}, [%r5+{upper << 16}];", count)
    for thread in range(128):
        for k in range(count):
            lane, column = where(shape, k, thread % 32)
            assert got[thread, k] == LANE_NUMBERS[thread // 32 * 32 + lane + upper, column]


@pytest.mark.parametrize("shape", SHAPES)
def test_stores(shape):
    """Stores of 7 in the first register, 8 in the next and so on, over the numbers of the lanes."""
    count = 2 * SHAPES[shape]
    values = "".join(f"mov.b32 %f{i}, {7 + i};" for i in range(count))
    store = f"{values} tcgen05.st.sync.aligned.{shape}.x2.b32 [%r5], {listed(count)};"
    load = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {listed(32)}, [%r5];"
    got = moved(f"{store} tcgen05.wait::st.sync.aligned; {load}", 32)
    expected = LANE_NUMBERS.copy()
    for thread in range(128):
        for k in range(count):
            lane, column = where(shape, k, thread % 32)
            expected[thread // 32 * 32 + lane, column] = 7 + k
    np.testing.assert_array_equal(got, expected)


def test_two_halves_of_columns():
    """.16x32bx2: the upper 16 threads have the same lanes, `immHalfSplitoff` columns on."""
    got = moved(f"tcgen05.ld.sync.aligned.16x32bx2.x4.b32 {listed(4)}, [%r5], 8;", 4)
    lane = np.arange(128) // 32 * 32 + np.arange(128) % 16
    column = 8 * (np.arange(128) % 32 // 16)
    np.testing.assert_array_equal(got, LANE_NUMBERS[lane[:, None], column[:, None] + np.arange(4)])


def test_columns_of_16_bits():
    """.pack::16b puts two into a register, .unpack::16b takes it apart."""
    got = moved(f"tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {listed(4)}, [%r5];", 4)
    low = LANE_NUMBERS & 0xFFFF
    np.testing.assert_array_equal(got, low[:, 0:8:2] | low[:, 1:8:2] << 16)
    store = f"tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r5], {listed(2)}; tcgen05.wait::st.sync.aligned;"
    got = moved(f"{store} tcgen05.ld.sync.aligned.32x32b.x4.b32 {listed(4)}, [%r5];", 4)
    expected = np.stack([part for k in range(2) for part in (LANE_NUMBERS[:, k] & 0xFFFF, LANE_NUMBERS[:, k] >> 16)], 1)
    np.testing.assert_array_equal(got, expected)


def test_a_register_may_be_used_before_the_wait():
    """ "Ordering through true register dependency will be respected"; the memory is not free before it."""
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%f0}, [%r5]; add.u32 %f0, %f0, 5;"
    assert (moved(load, 1)[:, 0] == LANE_NUMBERS[:, 0] + 5).all()
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%f1}; tcgen05.wait::st.sync.aligned;"
    with pytest.raises(EmulationError, match="RACE in tensor memory: write after read"):
        moved(load + store, 1)
    moved(load + "tcgen05.wait::ld.sync.aligned;" + store, 1)


@pytest.mark.parametrize(
    "line",
    [
        "tcgen05.mma.cta_group::1.kind::i8 [%r4], %d8, %d10, %r9, %p4;",
        "tcgen05.mma.cta_group::2.kind::f16 [%r4], %d8, %d10, %r9, %p4;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r4], %d8, %d10, %r9, %p4;",
        "tcgen05.cp.cta_group::1.128x256b [%r4], %d8;",
        "tcgen05.shift.cta_group::1.down [%r4];",
        "tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r1, %r2}, [%r4];",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r4];",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r4], %h1;",
        "tcgen05.alloc.cta_group::1.sync.aligned.b32 [%d1], 32;",
    ],
)
def test_what_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*tcgen05"):
        run_ptx(line, target="sm_100")
