"""cp.async: the bytes copied, when they are there, and copies that nothing waited for."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import ORDERS, run_ptx

EARLY, LATE, _ = ORDERS

HEAD = """
    mul.lo.u32 %r1, %lane, {size};
    cvt.u64.u32 %d9, %r1;
    add.u64 %d0, %a0, %d9;
    add.u64 %d1, %a1, %d9;
    mov.u32 %r8, shared;
    add.u32 %r9, %r8, %r1;"""
BACK = "ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r9+{0}]; st.global.v4.b32 [%d1+{0}], {{%r4, %r5, %r6, %r7}};"
BYTES = np.arange(1024, dtype=np.uint32).astype(np.uint8)


def copied(copies, back=1):
    """The bytes that 32 lanes copy, 16 each, and then load: `back` rows of 512 bytes."""
    out = np.zeros(1024, np.uint8)
    body = HEAD.format(size=16) + copies + "".join(BACK.format(512 * i) for i in range(back))
    run_ptx(body, BYTES, out, shared=1024)
    return out[: 512 * back]


WAIT = "cp.async.commit_group; cp.async.wait_group 0;"


@pytest.mark.parametrize("wait", [WAIT, "cp.async.wait_all;"])
def test_sixteen_bytes(wait):
    np.testing.assert_array_equal(copied(f"cp.async.cg.shared.global [%r9], [%d0], 16; {wait}"), BYTES[:512])


@pytest.mark.parametrize("size", [4, 8])
def test_smaller_copies(size):
    steps = "".join(f"cp.async.ca.shared.global [%r9+{at}], [%d0+{at}], {size};" for at in range(0, 16, size))
    np.testing.assert_array_equal(copied(steps + WAIT), BYTES[:512])


@pytest.mark.parametrize("have", [0, 4, 10, 16])
def test_what_the_source_lacks_is_zero(have):
    got = copied(f"cp.async.cg.shared.global [%r9], [%d0], 16, {have}; {WAIT}").reshape(32, 16)
    expected = BYTES[:512].reshape(32, 16).copy()
    expected[:, have:] = 0
    np.testing.assert_array_equal(got, expected)


def test_without_bytes_the_address_does_not_matter():
    assert not copied(f"cp.async.cg.shared.global [%r9], [%d0+1000000], 16, 0; {WAIT}").any()


TWO = """
    cp.async.cg.shared.global [%r9], [%d0], 16;
    cp.async.commit_group;
    cp.async.cg.shared.global [%r9+512], [%d0+512], 16;
    cp.async.commit_group;"""


def test_all_but_the_newest_groups_are_there():
    np.testing.assert_array_equal(copied(TWO + "cp.async.wait_group 1;" + BACK.format(0) + WAIT, 2), BYTES)


@pytest.mark.parametrize(("wait", "row"), [(1, 512), (2, 0)])
def test_a_group_that_was_not_waited_for_is_not_there(wait, row):
    with pytest.raises(EmulationError, match="RACE in shared memory: read after write"):
        copied(TWO + f"cp.async.wait_group {wait};" + BACK.format(row) + WAIT)


def test_copies_without_a_wait_are_noticed():
    with pytest.raises(EmulationError, match=r"cp\.async that nothing waited for"):
        run_ptx(HEAD.format(size=16) + "cp.async.cg.shared.global [%r9], [%d0], 16;", BYTES, BYTES.copy(), shared=512)
    with pytest.raises(EmulationError, match=r"cp\.async groups that nothing waited for"):
        run_ptx(HEAD.format(size=16) + TWO, BYTES, BYTES.copy(), shared=1024)


def test_a_wait_is_for_the_threads_own_copies():
    """Another warp's copies are there after its wait and a barrier."""
    body = (
        HEAD.format(size=16)
        + """
        setp.lt.u32 %p1, %tid, 32;
        @%p1 cp.async.cg.shared.global [%r9], [%d0], 16;
        cp.async.commit_group;
        cp.async.wait_group 0;
        {}
        @!%p1 ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r9];
        @!%p1 st.global.v4.b32 [%d1], {{%r4, %r5, %r6, %r7}};"""
    )
    out = np.zeros(512, np.uint8)
    run_ptx(body.format("bar.sync 0;"), BYTES, out, threads=64, shared=512)
    np.testing.assert_array_equal(out, BYTES[:512])
    with pytest.raises(EmulationError, match="RACE in shared memory"):
        run_ptx(body.format(""), BYTES, out, threads=64, shared=512)


BAR = 1024  # behind what is copied
INIT = f"""
    setp.eq.u32 %p2, %tid, 0;
    @%p2 mbarrier.init.shared::cta.b64 [shared+{BAR}], {{}};
    bar.sync 0;"""
COPY = "cp.async.cg.shared.global [%r9], [%d0], 16;"
MORE = "cp.async.cg.shared.global [%r9+512], [%d0+512], 16;"
NOINC = f"cp.async.mbarrier.arrive.noinc.shared.b64 [shared+{BAR}];"
INC = f"cp.async.mbarrier.arrive.shared.b64 [shared+{BAR}];"
ARRIVE = f"mbarrier.arrive.shared::cta.b64 _, [shared+{BAR}];"
AWAIT = f"""
    {{
    .reg .pred complete;
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [shared+{BAR}], 0;
    @!complete bra AGAIN;
    }}"""
IS_OVER = f"""
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [shared+{BAR}], 0;
    selp.b32 %r4, 1, 0, %p3;
    st.global.b32 [%a1], %r4;"""
# How the copies of a warp may end a phase: what its mbarrier expects, and what comes after them.
TRACKED = {"as arrivals that it expects": (32, NOINC), "beside its own arrivals": (32, INC + ARRIVE)}


def handed_over(count, producer, consumer):
    """A warp copies, and another one loads the bytes that are there."""
    out = np.zeros(1024, np.uint8)
    body = HEAD.format(size=16) + INIT.format(count)
    body += f"""
        setp.lt.u32 %p1, %tid, 32;
        @!%p1 bra CONSUMER;
        {producer}
        bra.uni END;
        CONSUMER:
        {consumer}
        END:"""
    run_ptx(body, BYTES, out, threads=64, shared=BAR + 8)
    return out


@pytest.mark.parametrize("way", TRACKED)
def test_an_mbarrier_hands_copies_over(way):
    count, arrive = TRACKED[way]
    np.testing.assert_array_equal(handed_over(count, COPY + arrive, AWAIT + BACK.format(0))[:512], BYTES[:512])


@pytest.mark.parametrize("way", TRACKED)
def test_without_its_wait_they_race(way):
    count, arrive = TRACKED[way]
    with pytest.raises(EmulationError, match="RACE in shared memory"):
        handed_over(count, COPY + arrive, BACK.format(0) + AWAIT)


def test_an_ordinary_arrival_says_nothing_of_copies():
    with pytest.raises(EmulationError, match="RACE in shared memory: read after write"):
        handed_over(32, COPY + ARRIVE + "cp.async.wait_all;", AWAIT + BACK.format(0))


def test_copies_after_the_arrival_are_not_tracked():
    producer = COPY + NOINC + MORE + "cp.async.wait_all;"
    np.testing.assert_array_equal(handed_over(32, producer, AWAIT + BACK.format(0))[:512], BYTES[:512])
    with pytest.raises(EmulationError, match="RACE in shared memory: read after write"):
        handed_over(32, producer, AWAIT + BACK.format(512))


def test_copies_that_a_wait_group_leaves_are_tracked_too():
    producer = COPY + "cp.async.commit_group;" + MORE + NOINC
    got = handed_over(32, producer, AWAIT + BACK.format(0) + BACK.format(512))
    np.testing.assert_array_equal(got, BYTES)


def is_over(order, count, code):
    out = np.full(1, 9, np.uint32)
    body = HEAD.format(size=16) + INIT.format(count) + code + IS_OVER
    run_ptx(body, BYTES, out, shared=BAR + 8, orders=[order], allowed="on their way")
    return out[0]


@pytest.mark.parametrize(("order", "expected"), [(EARLY, 1), (LATE, 0)], ids=["early", "late"])
def test_the_arrival_comes_when_the_copies_are_there(order, expected):
    assert is_over(order, 32, COPY + NOINC) == expected
    # One arrival more, which this instruction makes itself: those that the mbarrier expects are the warp's own.
    assert is_over(order, 32, COPY + INC + ARRIVE) == expected
    assert is_over(order, 33, COPY + NOINC) == 0
    assert is_over(order, 32, COPY + INC) == 0


def test_every_lane_arrives_for_its_own_copies():
    half = "setp.lt.u32 %p4, %lane, 16; @%p4 " + COPY
    assert is_over(EARLY, 16, half + "@%p4 " + NOINC) == 1
    assert is_over(EARLY, 32, half + "@%p4 " + NOINC) == 0


WRONG = {
    "source": ("cp.async.cg.shared.global [%r9], [%d0+8], 16;", "misaligned source"),
    "destination": ("cp.async.cg.shared.global [%r9+8], [%d0], 16;", "misaligned destination"),
    "more than the destination": ("cp.async.ca.shared.global [%r9], [%d0], 4, 8;", "more source than destination"),
    "out of bounds": ("cp.async.cg.shared.global [%r9], [%d0+1024], 16;", "global load of 16 bytes .* out of bounds"),
    "shared": ("cp.async.cg.shared.global [%r9+512], [%d0], 16;", "shared access .* out of bounds"),
    "cg": ("cp.async.cg.shared.global [%r9], [%d0], 8;", "cp.async.cg takes 16 bytes"),
    "mbarrier": ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];", "no mbarrier at shared offset 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_is_an_error_that_names_the_line(name):
    line, message = WRONG[name]
    with pytest.raises(EmulationError, match=rf"PTX line \d+(.|\n)*{message}"):
        run_ptx(HEAD.format(size=16) + line + WAIT, BYTES, BYTES.copy(), shared=512)
