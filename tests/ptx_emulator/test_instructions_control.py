"""Branches: lanes that go different ways, meet again, or end; PTX that is not understood."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError, Order
from ptx_emulator.ptx import lanes, run_ptx

LANES = np.arange(32)


def of_lanes(code, values=LANES):
    return lanes(code, "u32 u32", values)


def test_both_sides_of_a_branch_are_taken():
    code = """
        setp.lt.u32 p, a, 10;
        @p bra SMALL;
        mul.lo.u32 d, a, 100;
        bra.uni END;
        SMALL:
        add.u32 d, a, 1000;
        END:
        add.u32 d, d, 7;"""
    np.testing.assert_array_equal(of_lanes(code), np.where(LANES < 10, LANES + 1000, LANES * 100) + 7)


def test_each_lane_loops_as_often_as_it_must():
    code = """
        mov.u32 t, a;
        LOOP:
        setp.eq.u32 p, t, 0;
        @p bra END;
        add.u32 d, d, t;
        sub.u32 t, t, 1;
        bra LOOP;
        END:"""
    counts = LANES * 5 % 13
    np.testing.assert_array_equal(of_lanes(code, counts), counts * (counts + 1) // 2)


def test_lanes_meet_again_for_what_all_do():
    """Behind branches within branches and loops of different lengths a shuffle of the whole warp works."""
    code = """
        and.b32 t, a, 3;
        setp.eq.u32 p, t, 0;
        @p bra END;
        setp.eq.u32 q, t, 1;
        @q bra ONE;
        LOOP:
        add.u32 d, d, 1;
        sub.u32 t, t, 1;
        setp.ne.u32 p, t, 0;
        @p bra LOOP;
        bra END;
        ONE:
        mov.u32 d, 50;
        END:
        shfl.sync.bfly.b32 d, d, 1, 31, -1;"""
    before = np.array([0, 50, 2, 3])[LANES % 4]
    np.testing.assert_array_equal(of_lanes(code), before[LANES ^ 1])


def test_lanes_that_end_hold_up_no_other_lane():
    out = np.zeros(32, np.uint32)
    body = """
        mad.wide.u32 %d0, %lane, 4, %a0;
        st.global.b32 [%d0], 1;
        setp.lt.u32 %p1, %lane, 20;
        @%p1 ret;
        bar.warp.sync 0xfff00000;
        activemask.b32 %r1;
        st.global.b32 [%d0], %r1;"""
    run_ptx(body, out)
    assert out.tolist() == 20 * [1] + 12 * [0xFFF00000]


TABLE = """
    FIRST:
    mov.u32 d, 10;
    bra.uni END;
    SECOND:
    mov.u32 d, 20;
    bra.uni END;
    THIRD:
    mov.u32 d, 30;
    END:
    add.u32 d, d, a;"""
BRANCH = "targets: .branchtargets FIRST, SECOND, THIRD;\n {}brx.idx a, targets;" + TABLE


def test_indexed_branches():
    which = LANES * 7 % 3
    np.testing.assert_array_equal(of_lanes(BRANCH.format(""), which), 10 * (which + 1) + which)
    np.testing.assert_array_equal(of_lanes(BRANCH.format(""), np.full(32, 2)), 32)


def test_an_indexed_branch_beyond_its_targets_is_an_error():
    with pytest.raises(EmulationError, match=r"PTX line \d+: `brx.idx(.|\n)*index 3 of 3 targets"):
        of_lanes(BRANCH.format(""), np.full(32, 3))


def test_labels_are_those_of_their_braces():
    block = """{
        .reg .pred again;
        mov.u32 t, 2;
        L:
        add.u32 d, d, 1;
        sub.u32 t, t, 1;
        setp.ne.u32 again, t, 0;
        @again bra L;
        }"""
    assert set(of_lanes(block + block).tolist()) == {4}


def test_blocks_know_their_place():
    out = np.zeros((3, 2, 4), np.uint32)
    body = """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;
        mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y;
        mad.lo.u32 %r6, %r3, %r5, %r2;
        mad.lo.u32 %r6, %r6, %r4, %r1;
        mad.wide.u32 %d0, %r6, 4, %a0;
        mul.lo.u32 %r7, %r3, 100; mad.lo.u32 %r7, %r2, 10, %r7; add.u32 %r7, %r7, %r1;
        st.global.b32 [%d0], %r7;"""
    run_ptx(body, out, grid=(4, 2, 3))
    np.testing.assert_array_equal(out, np.add.outer(np.add.outer(100 * np.arange(3), 10 * np.arange(2)), np.arange(4)))


def test_a_loop_without_end_is_an_error_that_says_where():
    with pytest.raises(EmulationError, match=r"step budget is spent(.|\n)*PTX line \d+"):
        run_ptx("LOOP: bra.uni LOOP;", orders=[Order("early", step_budget=10_000)])


def test_a_trap_is_an_error():
    with pytest.raises(EmulationError, match=r"PTX line \d+: `.*trap`(.|\n)*lane 5: trap"):
        run_ptx("setp.eq.u32 %p1, %lane, 5;\n@%p1 trap;")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("frobnicate.b32 %r1, %r2;", r"PTX line \d+: instruction not implemented: frobnicate"),
        ("mov.b32 %r1, %nothing;", r"PTX line \d+: unknown register %nothing"),
        ("mov.b32 %r1, %d1;", r"PTX line \d+: operand of 64 bits, expected 32"),
        ("mov.b64 %r1, %d1;", r"PTX line \d+: destination of 32 bits, expected 64"),
        ("add.u32 %r1, %r2;", r"PTX line \d+: expected 3 operands"),
        ("bra NOWHERE;", "no label NOWHERE"),
        ("@%r1 mov.b32 %r1, 0;", r"PTX line \d+: guard"),
        (".local .b8 stack[16];", r"PTX line \d+: local memory"),
    ],
    ids=["instruction", "register", "source", "destination", "operands", "label", "guard", "local"],
)
def test_what_is_not_understood_is_an_error_that_names_its_line(line, message):
    with pytest.raises(EmulationError, match=message):
        run_ptx(line)


def test_an_error_names_the_line_it_is_about():
    body = "mov.b32 %r1, 0;\nmov.b32 %r2, 0;\nst.global.b32 [%a0+64], %r1;"
    with pytest.raises(EmulationError) as first:
        run_ptx(body, np.zeros(1, np.uint32))
    with pytest.raises(EmulationError) as second:
        run_ptx("\n\n\n" + body, np.zeros(1, np.uint32))

    def line(error):
        return int(str(error.value).split("PTX line ")[1].split(":")[0])

    assert line(second) == line(first) + 3
    assert "`st.global.b32 [%a0+64], %r1`" in str(first.value)


def test_of_several_instructions_of_a_line_the_one_is_named():
    with pytest.raises(EmulationError, match=r"`st\.global\.b32 \[%a0\+64\], %r1`"):
        run_ptx("mov.b32 %r1, 0; st.global.b32 [%a0+64], %r1;", np.zeros(1, np.uint32))
