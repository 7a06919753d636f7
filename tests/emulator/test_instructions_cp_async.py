"""cp.async: what is copied, when it is there, and what nobody waited for."""

import numpy as np
import pytest
from emulator.library import EmulationError
from emulator.ptx import run_ptx

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


def test_copies_that_nobody_waits_for_are_noticed():
    with pytest.raises(EmulationError, match=r"cp\.async that nobody waited for"):
        run_ptx(HEAD.format(size=16) + "cp.async.cg.shared.global [%r9], [%d0], 16;", BYTES, BYTES.copy(), shared=512)
    with pytest.raises(EmulationError, match=r"cp\.async groups that nobody waited for"):
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


WRONG = {
    "source": ("cp.async.cg.shared.global [%r9], [%d0+8], 16;", "misaligned source"),
    "destination": ("cp.async.cg.shared.global [%r9+8], [%d0], 16;", "misaligned destination"),
    "more than the destination": ("cp.async.ca.shared.global [%r9], [%d0], 4, 8;", "more source than destination"),
    "out of bounds": ("cp.async.cg.shared.global [%r9], [%d0+1024], 16;", "global load of 16 bytes .* out of bounds"),
    "shared": ("cp.async.cg.shared.global [%r9+512], [%d0], 16;", "shared access .* out of bounds"),
    "cg": ("cp.async.cg.shared.global [%r9], [%d0], 8;", "cp.async.cg takes 16 bytes"),
    "mbarrier": ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r8];", "not implemented"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_is_an_error_that_names_the_line(name):
    line, message = WRONG[name]
    with pytest.raises(EmulationError, match=rf"PTX line \d+(.|\n)*{message}"):
        run_ptx(HEAD.format(size=16) + line + WAIT, BYTES, BYTES.copy(), shared=512)
