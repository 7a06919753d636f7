"""mbarriers: phases and their parity, pending arrivals and bytes, and the accesses that they order."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import run_ptx

BAR = "[shared+16]"
# The first lane of the first warp makes an mbarrier; all threads see it.
INIT = """
    setp.eq.u32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared::cta.b64 [shared+16], {};
    bar.sync 0;"""
ARRIVE = f"mbarrier.arrive.shared::cta.b64 _, {BAR};"


def over(parity, to):
    """Code that writes whether the phase of this parity is over."""
    return f"""
        mbarrier.test_wait.parity.shared::cta.b64 %p2, {BAR}, {parity};
        selp.b32 %r1, 1, 0, %p2;
        @%p1 st.global.b32 [%a0+{4 * to}], %r1;"""


def wait(parity, guard=""):
    return f"""
        {{
        .reg .pred complete;
        AGAIN:
        {guard} mbarrier.try_wait.parity.shared::cta.b64 complete, {BAR}, {parity};
        @!complete bra AGAIN;
        }}"""


def seen(body, count, threads=32):
    out = np.full(count, 9, np.uint32)
    run_ptx(body, out, threads=threads, shared=64)
    return out.tolist()


def test_before_the_first_phase_ends_the_one_before_it_is_over():
    """ "phaseParity ... odd phases have a parity of 1": a wait for 1 passes at once, as producers of pipelines do."""
    assert seen(INIT.format(1) + over(0, 0) + over(1, 1), 2) == [0, 1]


def test_parity_alternates_with_every_phase():
    body = INIT.format(1)
    for phase in range(4):
        body += f"@%p1 {ARRIVE} bar.warp.sync -1;" + over(0, 2 * phase) + over(1, 2 * phase + 1)
    assert seen(body, 8) == [1, 0, 0, 1, 1, 0, 0, 1]


def test_a_phase_ends_with_the_last_arrival():
    body = INIT.format(64) + ARRIVE + "bar.warp.sync -1;" + over(0, 0)
    body += ARRIVE + "bar.warp.sync -1;" + over(0, 1)
    assert seen(body, 2) == [0, 1]


def test_an_arrival_may_count_for_several():
    counted = f"@%p1 mbarrier.arrive.shared::cta.b64 _, {BAR}, 3; bar.warp.sync -1;"
    body = INIT.format(4) + counted + over(0, 0) + f"@%p1 {ARRIVE} bar.warp.sync -1;" + over(0, 1)
    assert seen(body, 2) == [0, 1]


def test_expected_bytes_hold_a_phase_up():
    body = INIT.format(1) + f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, {BAR}, 64; bar.warp.sync -1;"
    with pytest.raises(EmulationError, match="Deadlock"):
        run_ptx(body + wait(0), np.zeros(1, np.uint32), shared=64)


@pytest.mark.parametrize("others", [0, 40, 63])
def test_a_wait_orders_what_was_written_before_the_arrivals(others):
    """The second warp reads what the first wrote, handed over by an mbarrier: no race; without the wait, one.

    The mbarrier is made after `others`.
    """
    made_before = "".join(f"@%p1 mbarrier.init.shared::cta.b64 [shared+{256 + 8 * i}], 1;" for i in range(others))
    body = (
        "setp.eq.u32 %p1, %tid, 0;"
        + made_before
        + INIT.format(32)
        + """
        setp.lt.u32 %p3, %tid, 32;
        mul.lo.u32 %r9, %lane, 4;
        mov.u32 %r8, shared;
        add.u32 %r9, %r9, %r8;
        mad.wide.u32 %d0, %lane, 4, %a0;
        @!%p3 bra CONSUMER;
        st.shared.b32 [%r9+64], %lane;
        """
        + ARRIVE
        + "bra.uni END; CONSUMER: {} ld.shared.b32 %r1, [%r9+64]; st.global.b32 [%d0], %r1; END:"
    )
    out = np.zeros(32, np.uint32)
    run_ptx(body.replace("{}", wait(0)), out, threads=64, shared=768)
    assert out.tolist() == list(range(32))
    with pytest.raises(EmulationError, match="RACE in shared memory"):
        run_ptx(body.replace("{}", ""), out, threads=64, shared=768)
    with pytest.raises(EmulationError, match="RACE in shared memory"):
        run_ptx(body.replace("{}", wait(1)), out, threads=64, shared=768)


def test_a_deadlock_says_which_warp_waits_for_what_and_where():
    message = r"Deadlock in test(.|\n)*shared offset 16, parity 0 \(phase 0, pending 1 of 1, tx 0\)(.|\n)*PTX line \d+"
    with pytest.raises(EmulationError, match=message):
        run_ptx(INIT.format(1) + wait(0), np.zeros(1, np.uint32), shared=64)


def test_a_barrier_may_be_made_again_after_inval():
    body = INIT.format(1) + f"@%p1 {ARRIVE} @%p1 mbarrier.inval.shared::cta.b64 {BAR};"
    body += f"@%p1 mbarrier.init.shared::cta.b64 {BAR}, 1; bar.warp.sync -1;" + over(0, 0)
    assert seen(body, 1) == [0]


WRONG = {
    "more arrivals than expected": (
        INIT.format(3) + f"@%p1 mbarrier.arrive.shared::cta.b64 _, {BAR}, 4;",
        "more arrivals",
    ),
    "no barrier": (f"setp.eq.u32 %p1, %tid, 0; @%p1 {ARRIVE}", "no mbarrier at shared offset 16"),
    "wait on no barrier": (over(0, 0).replace("@%p1", ""), "wait on no mbarrier"),
    "after inval": (INIT.format(1) + f"@%p1 mbarrier.inval.shared::cta.b64 {BAR}; @%p1 {ARRIVE}", "no mbarrier"),
    "init in use": (INIT.format(1) + f"@%p1 mbarrier.init.shared::cta.b64 {BAR}, 1;", "in use"),
    "misaligned": (INIT.format(1).replace("+16", "+20"), "misaligned"),
    "count of zero": (INIT.format(0), "count"),
    "parity": (INIT.format(1) + over(2, 0), "parity 2"),
    "beyond shared memory": (INIT.format(1).replace("+16", "+64"), "out of bounds"),
    "wait by state": (
        INIT.format(1) + f"mbarrier.test_wait.shared::cta.b64 %p2, {BAR}, %d1;",
        r"PTX line \d+: mbarrier wait by state",
    ),
    "arrive_drop": (INIT.format(1) + f"mbarrier.arrive_drop.shared::cta.b64 _, {BAR};", "not implemented"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_is_an_error(name):
    body, message = WRONG[name]
    with pytest.raises(EmulationError, match=message):
        run_ptx(body, np.zeros(1, np.uint32), shared=64)


def test_a_use_that_nothing_orders_after_init_is_a_race():
    body = INIT.format(64).replace("bar.sync 0;", "") + ARRIVE
    with pytest.raises(EmulationError, match="RACE on an mbarrier: used by a warp that is not ordered after its init"):
        run_ptx(body, np.zeros(1, np.uint32), threads=64, shared=64)


def test_more_mbarriers_than_the_search_for_races_tracks_are_an_error():
    made = "setp.eq.u32 %p1, %tid, 0;"
    made += "".join(f"@%p1 mbarrier.init.shared::cta.b64 [shared+{8 * i}], 1;" for i in range(65))
    with pytest.raises(EmulationError, match="too many mbarriers for the search for races"):
        run_ptx(made, np.zeros(1, np.uint32), shared=1024)


def test_inval_that_nothing_orders_after_a_use_is_a_race():
    body = INIT.format(64) + ARRIVE + "{}" + f"@%p1 mbarrier.inval.shared::cta.b64 {BAR};"
    run_ptx(body.format("bar.sync 0;"), np.zeros(1, np.uint32), threads=64, shared=64)
    with pytest.raises(EmulationError, match="mbarrier"):
        run_ptx(body.format(""), np.zeros(1, np.uint32), threads=64, shared=64)
