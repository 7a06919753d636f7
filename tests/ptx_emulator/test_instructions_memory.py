"""Loads, stores and atomics; an access that is out of bounds or misaligned is an error that says where."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import brains, halves, run_ptx

OWN = "mad.wide.u32 %d0, %lane, {}, %a0; mad.wide.u32 %d1, %lane, {}, %a1;"
SHARED = "mul.lo.u32 %r9, %lane, 4; mov.u32 %r8, shared; add.u32 %r9, %r9, %r8;"


@pytest.mark.parametrize(
    ("kind", "bits", "expected"),
    [
        ("u8", 32, 0x80),
        ("s8", 32, -0x80),
        ("u16", 32, 0xFF80),
        ("s16", 32, -0x80),
        ("s16", 64, -0x80),
        ("s32", 64, -0x80),
    ],
)
def test_narrow_loads_extend_into_wider_registers(kind, bits, expected):
    source = np.full(1, -0x80, np.int64)
    out = np.zeros(1, f"int{bits}")
    register = {32: "%r1", 64: "%d1"}[bits]
    run_ptx(f"ld.global.{kind} {register}, [%a0]; st.global.b{bits} [%a1], {register};", source, out)
    assert out[0] == expected


@pytest.mark.parametrize("modifiers", ["", ".nc", ".relaxed.gpu", ".acquire.gpu", ".L1::evict_last.L2::cache_hint"])
def test_vectors_are_consecutive(modifiers):
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    policy = ", %d9" if "hint" in modifiers else ""
    make = "createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;" if policy else ""
    body = f"{make} ld.global{modifiers}.v4.b32 {{%r1, %r2, _, %r4}}, [%d0]{policy};"
    run_ptx(OWN.format(16, 16) + body + "st.global.v4.b32 [%d1], {%r4, %r2, 7, %r1};", source, out)
    rows = source.reshape(32, 4)
    np.testing.assert_array_equal(
        out.reshape(32, 4), np.stack([rows[:, 3], rows[:, 1], 0 * rows[:, 0] + 7, rows[:, 0]], 1)
    )


def test_narrow_stores_leave_their_neighbours():
    out = np.full(32, 0xAAAAAAAA, np.uint32)
    run_ptx(OWN.format(4, 4).replace("%a1", "%a0") + "st.global.b8 [%d0+1], 0x55; st.global.b16 [%d0+2], 0x1234;", out)
    assert set(out.tolist()) == {0x123455AA}


def test_lanes_without_a_guard_neither_load_nor_store():
    source, out = np.arange(4, dtype=np.uint32), np.full(32, 9, np.uint32)
    body = "setp.lt.u32 %p1, %lane, 4; mov.b32 %r1, 5; @%p1 ld.global.b32 %r1, [%d0]; @%p1 st.global.b32 [%d1], %r1;"
    run_ptx(OWN.format(4, 4) + body, source, out)
    assert out.tolist() == [0, 1, 2, 3] + 28 * [9]


def test_shared_memory_is_a_blocks_own():
    out = np.zeros(8, np.uint32)
    body = """
        mov.u32 %r1, %ctaid.x;
        setp.eq.u32 %p1, %lane, 0;
        @%p1 st.shared.b32 [shared+4], %r1;
        bar.sync 0;
        ld.shared.b32 %r2, [shared+4];
        mad.wide.u32 %d0, %r1, 4, %a0;
        @%p1 st.global.b32 [%d0], %r2;"""
    run_ptx(body, out, grid=(8, 1, 1), shared=8)
    assert out.tolist() == list(range(8))


ATOMICS = [
    ("add.u32", 2**32 - 1, 5, 4),
    ("add.u64", 2**40, 2**40, 2**41),
    ("exch.b32", 3, 9, 9),
    ("min.s32", 1, 2**32 - 5, 2**32 - 5),
    ("min.u32", 1, 2**32 - 5, 1),
    ("max.s32", 1, 2**32 - 5, 1),
    ("max.u64", 1, 2**60, 2**60),
    ("and.b32", 0xFF, 0x0F0, 0xF0),
    ("or.b32", 0xF, 0xF0, 0xFF),
    ("xor.b64", 0xFF, 0xF, 0xF0),
    # "inc": back to zero at the bound; "dec": back to the bound at zero or beyond it.
    ("inc.u32", 6, 7, 7),
    ("inc.u32", 7, 7, 0),
    ("inc.u32", 8, 7, 0),
    ("dec.u32", 7, 7, 6),
    ("dec.u32", 0, 7, 7),
    ("dec.u32", 9, 7, 7),
]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("name", "old", "value", "new"), ATOMICS, ids=[f"{name}_{old}" for name, old, _, _ in ATOMICS])
def test_atomics_change_memory_and_give_what_was_there(name, old, value, new, space):
    bits = int(name[-2:])
    register = {32: "%r", 64: "%d"}[bits]
    memory, out = np.array([old, value], f"uint{bits}"), np.zeros(2, f"uint{bits}")
    at = "%a0" if space == "global" else "shared"
    fill = (
        ""
        if space == "global"
        else f"@%p1 ld.global.b{bits} {register}5, [%a0]; @%p1 st.shared.b{bits} [shared], {register}5;"
    )
    body = f"""
        setp.eq.u32 %p1, %lane, 0;
        {fill}
        @%p1 ld.global.b{bits} {register}1, [%a0+{bits // 8}];
        @%p1 atom.{space}.{name} {register}2, [{at}], {register}1;
        @%p1 ld.{space}.b{bits} {register}3, [{at}];
        @%p1 st.global.v2.b{bits} [%a1], {{{register}2, {register}3}};"""
    run_ptx(body, memory, out, shared=8)
    assert out.tolist() == [old, new]


@pytest.mark.parametrize(("old", "expected"), [(5, 11), (6, 6)])
def test_compare_and_swap(old, expected):
    memory, out = np.array([old], np.uint32), np.zeros(1, np.uint32)
    run_ptx(
        "setp.eq.u32 %p1, %lane, 0; @%p1 atom.global.cas.b32 %r1, [%a0], 5, 11; @%p1 st.global.b32 [%a1], %r1;",
        memory,
        out,
    )
    assert (memory[0], out[0]) == (expected, old)


def test_every_lane_gets_a_ticket():
    counter, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    run_ptx(
        "atom.global.add.u32 %r1, [%a0], 2; mad.wide.u32 %d1, %lane, 4, %a1; st.global.b32 [%d1], %r1;", counter, out
    )
    assert counter[0] == 64
    assert sorted(out.tolist()) == list(range(0, 64, 2))


def test_floats_are_added():
    memory = np.zeros(32, np.float32)
    body = "cvt.rn.f32.u32 %f1, %lane; red.global.add.f32 [%a0], %f1; red.global.add.v2.f32 [%a0+8], {%f1, 0f3F800000};"
    run_ptx(body, memory)
    assert memory[:4].tolist() == [496, 0, 496, 32]


@pytest.mark.parametrize(("kind", "pack"), [("f16", halves), ("bf16", brains)])
def test_halves_are_added(kind, pack):
    one, total = pack([1, 2]), pack([32, 64])
    memory = np.zeros(4, np.uint16)
    pair = int(one[1]) << 16 | int(one[0])
    body = (
        f"mov.b16 %h1, {one[0]}; red.global.add.noftz.{kind} [%a0], %h1; red.global.add.noftz.{kind}x2 [%a0+4], {pair};"
    )
    run_ptx(body, memory)
    assert memory.tolist() == [total[0], 0, total[0], total[1]]


def test_prefetches_and_fences_do_nothing():
    out = np.zeros(1, np.uint32)
    run_ptx("prefetch.global.L2 [%a0]; fence.acq_rel.gpu; membar.gl; nanosleep.u32 20; st.global.b32 [%a0], 3;", out)
    assert out[0] == 3


WRONG = {
    "past the end": ("ld.global.b32 %r1, [%a0+16];", "global load of 4 bytes .* out of bounds: 4 bytes past the end"),
    "across the end": ("ld.global.v2.b64 {%d1, %d2}, [%a0+16];", "global load of 16 bytes .* out of bounds"),
    "before": ("st.global.b32 [%a0+-4], %r1;", "global store of 4 bytes .* out of bounds: 4 bytes before"),
    "misaligned": ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%a0+4];", "misaligned access of 16 bytes"),
    "atomic": ("red.global.add.u32 [%a0+16], 1;", "out of bounds"),
    "shared": ("ld.shared.b32 %r1, [shared+64];", "shared access of 4 bytes at offset 64 is out of bounds"),
    "before shared": ("st.shared.b32 [shared+-4], %r1;", "shared access of 4 bytes at offset -4 is out of bounds"),
    "misaligned shared": ("ld.shared.b64 %d1, [shared+4];", "misaligned access of 8 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_addresses_are_errors_that_name_the_line(name):
    line, message = WRONG[name]
    with pytest.raises(EmulationError, match=rf"PTX line \d+: `{line.split()[0]}(.|\n)*{message}"):
        run_ptx(line, np.zeros(4, np.uint32), shared=64)


@pytest.mark.parametrize(
    "line",
    [
        "ld.b32 %r1, [%a0];",
        "atom.global.add.f64x2 %d1, [%a0], %d1;",
        "ld.global.b64 %r1, [%a0];",
        "st.shared::cluster.b32 [shared], 1;",
    ],
)
def test_what_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+"):
        run_ptx(line, np.zeros(4, np.uint32))


@pytest.mark.parametrize("kind", ["between", "after"])
def test_accesses_that_nothing_orders_are_races(kind):
    """One warp writes what another reads, with a barrier (none) or without (a race)."""
    out = np.zeros(32, np.uint32)
    body = """
        setp.lt.u32 %p1, %tid, 32;
        @%p1 st.shared.b32 [%r9], %lane;
        {}
        @!%p1 ld.shared.b32 %r1, [%r9];
        mad.wide.u32 %d0, %lane, 4, %a0;
        @!%p1 st.global.b32 [%d0], %r1;
        {}"""
    barriers = ("bar.sync 0;", "") if kind == "between" else ("", "bar.sync 0;")
    if kind == "between":
        run_ptx(SHARED + body.format(*barriers), out, threads=64, shared=128)
        assert out.tolist() == list(range(32))
    else:
        with pytest.raises(EmulationError, match="RACE in shared memory: read after write"):
            run_ptx(SHARED + body.format(*barriers), out, threads=64, shared=128)


def test_blocks_that_write_what_others_read_race():
    with pytest.raises(EmulationError, match="GLOBAL RACE"):
        run_ptx("mov.u32 %r1, %ctaid.x; st.global.b32 [%a0], %r1;", np.full(1, 9, np.uint32), grid=(2, 1, 1))
