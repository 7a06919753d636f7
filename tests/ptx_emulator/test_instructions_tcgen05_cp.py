"""tcgen05.cp: where it copies scale factors to, and what orders it with products, loads, stores and shared memory."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import run_ptx
from ptx_emulator.scaled import BARRIER, BASE, ROWS, ScaledProduct


def copied(descriptor, image, more="", shared=8192):
    """Four columns of tensor memory in all lanes after a tcgen05.cp from this image of shared memory."""
    out = np.zeros((ROWS, 4), np.uint32)
    bar, table, each = shared, shared + 8, len(image) // 128
    run_ptx(
        f"""
        setp.lt.u32 %p1, %tid, 32;
        setp.eq.u32 %p2, %tid, 0;
        mul.wide.u32 %d1, %tid, {each}; add.u64 %d1, %d1, %a0;
        mov.u32 %r1, shared; mad.lo.u32 %r1, %tid, {each}, %r1;
        {"".join(f"ld.global.b32 %r2, [%d1+{i}]; st.shared.b32 [%r1+{i}], %r2;" for i in range(0, each, 4))}
        @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [shared+{table}], 32;
        @%p2 mbarrier.init.shared::cta.b64 [shared+{bar}], 1;
        fence.proxy.async.shared::cta; bar.sync 0;
        ld.shared.b32 %r4, [shared+{table}];
        and.b32 %r5, %tid, 96; shl.b32 %r5, %r5, 16; add.u32 %r5, %r5, %r4;
        mov.b64 %d8, {descriptor}; add.u32 %r6, %r4, 8; {more}
        @%p2 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r6], %d8;
        @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [shared+{bar}];
        AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p5, [shared+{bar}], 0; @!%p5 bra AGAIN;
        tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%f0, %f1, %f2, %f3}}, [%r5+8]; tcgen05.wait::ld.sync.aligned;
        mad.wide.u32 %d2, %tid, 16, %a1; st.global.v4.b32 [%d2], {{%f0, %f1, %f2, %f3}};
        bar.sync 0;
        @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;""",
        *(image, out),
        **{"target": "sm_100", "threads": 128, "shared": shared + 16},
    )
    return out


IMAGE = np.random.default_rng(2).integers(0, 256, 8192, np.uint8)


@pytest.mark.parametrize(("start", "stride"), [(0, 128), (512, 128), (1040, 128), (16, 272)])
def test_a_copy_reaches_each_quarter_of_the_lanes(start, stride):
    """Eights of rows of 16 bytes, `stride` from one to the next."""
    rows = np.stack([IMAGE[start + row // 8 * stride + row % 8 * 16 :][:16] for row in range(32)])
    descriptor = 1024 + start >> 4 | stride >> 4 << 32 | 1 << 46
    np.testing.assert_array_equal(copied(descriptor, IMAGE), np.tile(rows.view(np.uint32), (4, 1)))


def test_a_base_offset_means_nothing_to_a_copy_without_a_swizzle():
    """Triton gives one for a start that is no multiple of 1024 bytes."""
    plain = 1024 + 512 >> 4 | 128 >> 4 << 32 | 1 << 46
    np.testing.assert_array_equal(copied(plain | 4 << 49, IMAGE), copied(plain, IMAGE))


@pytest.mark.parametrize(
    ("bits", "more", "message"),
    [
        (2 << 61, "", "tcgen05.cp with a swizzle"),
        (1 << 46, "", "bits 46-48 are not 1"),
        (1 << 13, "", "out of bounds"),
        (0, "add.u32 %r6, %r6, 2097152;", "tcgen05.cp to lane 32"),
        (0, "add.u32 %r6, %r6, 24;", "not allocated|out of bounds"),
    ],
    ids=["swizzle", "version", "beyond", "lane", "columns"],
)
def test_a_copy_that_may_not_be_is_an_error_that_names_the_line(bits, more, message):
    with pytest.raises(EmulationError, match=rf"PTX line \d+: .*tcgen05.cp(.|\n)*({message})"):
        copied((1024 >> 4 | 128 >> 4 << 32 | 1 << 46) ^ bits, IMAGE, more)


OVERWRITE = "mov.u32 %r20, shared; @%p2 st.shared.b32 [%r20+{}], %r20;"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r21], {%r20}; tcgen05.wait::st.sync.aligned;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r21]; tcgen05.wait::ld.sync.aligned;"
# Mistakes in the steps of a scaled product, and their errors. `{}` is the right step, `%r21` the address of the factors
# of A in columns 64 to 67, behind D; those of B are in columns 68 and 69. Mode late adds 256 to both.
MISTAKES = {
    "no factors of A": ({"copy_a": ""}, "UNWRITTEN: an operand in tensor memory.*column (64|320)"),
    "no factors of B": ({"copy_b": ""}, "UNWRITTEN: an operand in tensor memory.*column (68|324)"),
    "factors of A copied later": ({"copy_a": "", "mma": "{} COPY_A"}, "UNWRITTEN: an operand in tensor memory"),
    "no fence of factors": ({"fence": ""}, "PROXY: the async proxy reads(.|\n)*tcgen05.cp"),
    "no barrier after it": ({"meet": "bar.warp.sync -1;"}, "RACE in shared memory"),
    "no commit": ({"commit": ""}, "Deadlock"),
    "commit before the copies": ({"copy_a": "COMMIT {}", "commit": ""}, "RACE in tensor memory"),
    "no wait": ({"wait": ""}, "RACE in tensor memory: read after write"),
    "source overwritten": ({"copy_b": "{} " + OVERWRITE}, "RACE in shared memory: write after read"),
    "source overwritten after the product": ({"commit": "{} " + OVERWRITE}, "RACE in shared memory: write after read"),
    "copies by another warp": ({"copy_a": "OTHER {} OWN"}, "MMAs or copies of two warps are not ordered"),
    "product by another warp": ({"mma": "OTHER {}"}, "MMAs or copies of two warps are not ordered"),
    "factors loaded before the wait": ({"commit": LOAD + "{}"}, "RACE in tensor memory: read after write"),
    "factors stored before the wait": ({"commit": STORE + "{}"}, "RACE in tensor memory: write after"),
    "copied over stores": ({"copy_a": STORE.split(";")[0] + "; {}"}, "RACE in tensor memory: write after write"),
    "copied over loads": (
        {"prepare": STORE + BARRIER, "copy_a": LOAD.split(";")[0] + "; {}"},
        "RACE in tensor memory: write after read",
    ),
}


def with_mistake(name):
    product = ScaledProduct()
    factors = product.parts[2].start - BASE
    for step, text in MISTAKES[name][0].items():
        for old, new in (
            ("COPY_A", product.copy(2, 0, product.a_factors)),
            ("COMMIT", ScaledProduct().commit),
            ("OTHER", "setp.eq.u32 %p2, %tid, 32;"),
            ("OWN", "setp.eq.u32 %p2, %tid, 0;"),
            ("[%r20+{}]", f"[%r20+{factors}]"),
        ):
            text = text.replace(old, new)
        setattr(product, step, text.replace("{}", getattr(product, step)))
    product.prepare = f"add.u32 %r21, %r5, {product.a_factors}; {product.prepare}"
    return product


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name):
    with pytest.raises(EmulationError, match=MISTAKES[name][1]):
        with_mistake(name).run()


def test_factors_may_be_copied_by_another_warp_before_a_barrier():
    product = ScaledProduct()
    product.copy_a = f"setp.eq.u32 %p2, %tid, 32; {product.copy_a}"
    product.mma = f"{BARRIER} setp.eq.u32 %p2, %tid, 0; {product.mma}"
    product.check()


def test_factors_may_be_stored_by_threads():
    """They need no tcgen05.cp: each warp stores those of its quarter of the lanes."""
    product = ScaledProduct(16)
    chunk = product.parts[2].start
    product.copy_a = f"""
        add.u32 %r21, %r5, {product.a_factors}; mad.lo.u32 %r20, %lane, 16, {chunk};
        ld.shared.v4.b32 {{%r22, %r23, %r24, %r25}}, [%r20];
        tcgen05.st.sync.aligned.32x32b.x4.b32 [%r21], {{%r22, %r23, %r24, %r25}};
        tcgen05.wait::st.sync.aligned; {BARRIER}"""
    product.check()
    right = product.copy_a
    product.copy_a = right.replace("tcgen05.wait::st.sync.aligned;", "")
    with pytest.raises(EmulationError, match="RACE in tensor memory: read after write"):
        product.run()
    for warp in range(4):
        skip = f"shr.u32 %r26, %tid, 5; setp.eq.u32 %p6, %r26, {warp}; @%p6 bra SKIP;"
        product.copy_a = right.replace("tcgen05.st", f"{skip} tcgen05.st").replace(BARRIER, f"SKIP: {BARRIER}")
        with pytest.raises(EmulationError, match=f"UNWRITTEN: an operand in tensor memory.*lanes from {32 * warp} on"):
            product.run()


def test_new_factors_may_follow_a_product_without_a_wait():
    """Copies and products are done in their order: the second step finds its factors where those of the first were."""
    product, other = ScaledProduct(48), ScaledProduct(48, factors=(np.full((ROWS, 1), 2), np.full((48, 1), 1)))
    more = other.multiply(0).replace("%p4, 0, 0", "%p4, 1, 0")
    product.parts += other.parts[2:3]
    chunk = len(product.parts[3].data)
    product.parts[4].start = product.parts[3].start + chunk
    product.table, product.bar = product.table + chunk, product.bar + chunk
    product.write_steps()
    product.mma += product.copy(4, 0, product.a_factors) + more
    column = 2.0 ** product.factors[1][:, 0]
    np.testing.assert_array_equal(product.run(), product.expected() + product.a @ product.b.T * 4 * column)


@pytest.mark.parametrize(
    "line",
    [
        "tcgen05.cp.cta_group::1.32x128b [%r4], %d8;",
        "tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%r4], %d8;",
        "tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b4x16_p64 [%r4], %d8;",
        "tcgen05.cp.cta_group::2.32x128b.warpx4 [%r4], %d8;",
    ],
)
def test_what_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+: .*tcgen05"):
        run_ptx(line, target="sm_100")
