"""Named barriers with counts of threads, and registers that warps hand over."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import run_ptx

# Four warps, with a predicate for the first; a place for each thread in shared memory and in the output.
HEAD = """
    mov.u32 %r9, shared;
    mad.lo.u32 %r8, %tid, 4, %r9;
    mad.wide.u32 %d0, %tid, 4, %a0;
    setp.lt.u32 %p1, %tid, 32;
    shr.u32 %r7, %tid, 5;"""
# Load what the thread 32 threads further on, modulo the block, has written.
NEXT = """
    add.u32 %r1, %tid, 32;
    and.b32 %r1, %r1, {last};
    mad.lo.u32 %r1, %r1, 4, %r9;
    ld.shared.b32 %r2, [%r1];
    st.global.b32 [%d0], %r2;"""


def run(body, threads=128, maxnreg=0):
    out = np.zeros(threads, np.uint32)
    run_ptx(HEAD + body, out, threads=threads, shared=4 * threads, maxnreg=maxnreg)
    return out


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync.aligned 3;", "bar.cta.sync 1, 128;", "bar.sync %r6;"])
def test_all_threads_meet(barrier):
    out = run(f"mov.u32 %r6, 5; st.shared.b32 [%r8], %tid; {barrier}" + NEXT.format(last=127))
    np.testing.assert_array_equal(out, (np.arange(128) + 32) % 128)


def test_without_the_barrier_they_race():
    with pytest.raises(EmulationError, match="RACE in shared memory"):
        run("st.shared.b32 [%r8], %tid;" + NEXT.format(last=127))


def test_some_threads_meet_at_a_barrier_of_their_own():
    """Warps 0 and 1 at barrier 1, warps 2 and 3 at barrier 2."""
    pairs = """
        shr.u32 %r6, %tid, 6;
        add.u32 %r6, %r6, 1;
        st.shared.b32 [%r8], %tid;
        bar.sync %r6, 64;
        xor.b32 %r1, %tid, 32;
        mad.lo.u32 %r1, %r1, 4, %r9;
        ld.shared.b32 %r2, [%r1];
        st.global.b32 [%d0], %r2;"""
    np.testing.assert_array_equal(run(pairs), np.arange(128) ^ 32)


PRODUCER = """
    @!%p1 bra OTHERS;
    st.shared.b32 [%r8], %tid;
    {}
    bra.uni END;
    OTHERS:
    {}
    mad.lo.u32 %r1, %lane, 4, %r9;
    ld.shared.b32 %r2, [%r1];
    st.global.b32 [%d0], %r2;
    END:"""


def test_a_warp_that_arrives_does_not_wait():
    out = run(PRODUCER.format("bar.arrive 1, 128;", "bar.sync 1, 128;"))
    np.testing.assert_array_equal(out[32:], np.tile(np.arange(32), 3))


def test_arriving_orders_nothing_for_the_warp_that_arrives():
    with pytest.raises(EmulationError, match="RACE in shared memory"):
        run(PRODUCER.format("bar.sync 1, 128;", "bar.arrive 1, 128;"))


WRONG = {
    "too few": (PRODUCER.format("", "bar.sync 1, 128;"), r"Deadlock(.|\n)*at barrier 1 \(96 of 128 threads came\)"),
    "too many": ("bar.sync 1, 64; bar.sync 1, 96;", "barrier"),
    "other counts": (PRODUCER.format("bar.sync 1, 64;", "bar.sync 1, 128;"), "thread counts differ"),
    "no such barrier": ("bar.sync 16;", "barrier number"),
    "some lanes": ("setp.lt.u32 %p2, %lane, 3; @%p2 bar.sync 0;", "lanes 00000007 only"),
    "another barrier": (PRODUCER.format("bar.sync 1;", "bar.sync 2;"), "Deadlock"),
    "reduction": ("bar.red.popc.u32 %r1, 0, %p1;", r"PTX line \d+: barrier"),
    "clusters": ("barrier.cluster.arrive;", r"PTX line \d+: clusters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_is_an_error(name):
    body, message = WRONG[name]
    with pytest.raises(EmulationError, match=message):
        run(body)


# Warps 0 to 3 give back, 4 to 7 take.
GIVE_AND_TAKE = """
    setp.lt.u32 %p2, %tid, 128;
    @!%p2 bra TAKE;
    {}
    bra.uni END;
    TAKE:
    {}
    st.global.b32 [%d0], 1;
    END:"""


def test_registers_are_taken_when_others_have_given_them_back():
    out = run(
        GIVE_AND_TAKE.format("setmaxnreg.dec.sync.aligned.u32 40;", "setmaxnreg.inc.sync.aligned.u32 88;"), 256, 64
    )
    assert out.tolist() == 128 * [0] + 128 * [1]


REGISTERS = {
    "never given back": (
        ("", "setmaxnreg.inc.sync.aligned.u32 88;"),
        64,
        r"Deadlock(.|\n)*at setmaxnreg \(64 of 88 registers",
    ),
    "too few given back": (
        ("setmaxnreg.dec.sync.aligned.u32 48;", "setmaxnreg.inc.sync.aligned.u32 88;"),
        64,
        r"Deadlock(.|\n)*at setmaxnreg",
    ),
    "increased by dec": (("setmaxnreg.dec.sync.aligned.u32 80;", ""), 64, "setmaxnreg from 64 registers"),
    "no multiple of eight": (("setmaxnreg.dec.sync.aligned.u32 42;", ""), 64, "setmaxnreg: count"),
    "without .maxnreg": (("setmaxnreg.dec.sync.aligned.u32 40;", ""), 0, "in a kernel without .maxnreg"),
}


@pytest.mark.parametrize("name", REGISTERS)
def test_registers_that_cannot_be_had_are_an_error(name):
    parts, maxnreg, message = REGISTERS[name]
    with pytest.raises(EmulationError, match=message):
        run(GIVE_AND_TAKE.format(*parts), 256, maxnreg)
