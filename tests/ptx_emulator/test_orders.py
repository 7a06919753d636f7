"""Orders of execution start from the same memory, and must leave the same bytes."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError, Order
from ptx_emulator.ptx import ORDERS, run_ptx

EARLY, LATE, RANDOM = ORDERS
BLOCKS = 8
# Every block takes a number, in the order in which blocks come.
TICKET = """
    setp.eq.u32 %p1, %lane, 0;
    mov.u32 %r1, %ctaid.x;
    @%p1 atom.global.add.u32 %r2, [%a0], 1;
    mul.wide.u32 %d1, %r1, 4;
    mul.wide.u32 %d2, %r2, 4;"""


def run(body, out, orders=ORDERS):
    run_ptx(TICKET + body, np.zeros(1, np.uint32), out, grid=(BLOCKS, 1, 1), orders=orders)


def test_bytes_that_differ_are_an_error():
    """Each block stores its ticket: only atomics meet, without a race."""
    out = np.full(BLOCKS, 99, np.uint32)
    with pytest.raises(EmulationError, match="global memory differs between early and random") as error:
        run("add.u64 %d1, %a1, %d1; @%p1 st.global.b32 [%d1], %r2;", out)
    assert f"the first at {out.ctypes.data:#x}" in str(error.value)


def test_bytes_that_only_one_order_writes_are_an_error():
    """The second block stores the byte that was there before."""
    body = "add.u64 %d1, %a1, %d1; setp.eq.and.u32 %p2, %r2, 1, %p1; @%p2 st.global.b8 [%d1], 99;"
    out = np.full(BLOCKS, 99, np.uint32)
    with pytest.raises(
        EmulationError, match=r"differs between early and random.*: 2 bytes.*0x63 \(early\), not written"
    ):
        run(body, out)
    run(body, out, [EARLY, LATE])


def test_what_does_not_depend_on_the_order_is_not():
    out = np.full(BLOCKS, 99, np.uint32)
    run("add.u64 %d1, %a1, %d1; @%p1 st.global.b32 [%d1], %r1;", out)
    assert out.tolist() == list(range(BLOCKS))
    run("@%p1 red.global.add.u32 [%a1], %r2;", out)
    assert out[0] == BLOCKS * (BLOCKS - 1) // 2


@pytest.mark.parametrize("orders", [ORDERS, ORDERS[:2], ORDERS[2:]], ids=len)
def test_each_starts_from_the_same_memory(orders):
    """Memory holds the bytes that one order wrote, and bytes beside them are as before."""
    counter, out = np.full(4, 5, np.uint16), np.arange(200, dtype=np.uint8)
    body = """
        ld.global.b16 %h1, [%a0+2];
        add.u16 %h1, %h1, 1;
        st.global.b16 [%a0+2], %h1;
        cvt.u64.u32 %d1, %lane;
        add.u64 %d1, %d1, %a1;
        st.global.b8 [%d1+60], 7;"""
    run_ptx(body, counter, out, orders=orders)
    assert counter.tolist() == [5, 6, 5, 5]
    expected = np.arange(200)
    expected[60:92] = 7
    np.testing.assert_array_equal(out, expected)


def test_a_random_order_is_the_same_again():
    """Another seed gives another order."""

    def tickets(seed):
        out = np.zeros(BLOCKS, np.uint32)
        order = Order("random", seed=seed, random_schedule=True, resident=4)
        run("add.u64 %d1, %a1, %d1; @%p1 st.global.b32 [%d1], %r2;", out, [order])
        assert sorted(out) == list(range(BLOCKS))
        return out.tolist()

    assert tickets(3) == tickets(3)
    assert len({tuple(tickets(seed)) for seed in range(5)}) > 1
