"""ldmatrix and stmatrix: 8 x 8 halves; each lane holds two neighbours of a row, or with .trans of a column."""

import numpy as np
import pytest
from ptx_emulator.library import EmulationError
from ptx_emulator.ptx import run_ptx

LANE = np.arange(32)
ROWS = np.arange(256, dtype=np.uint16).reshape(4, 8, 8) + 1000  # four matrices
# Shared memory holds row r of all at 16 * r; its copy, and a lane's place in the output.
FILL = """
    mov.u32 %r9, shared;
    mad.wide.u32 %d0, %lane, 16, %a0;
    mad.wide.u32 %d1, %lane, 16, %a1;
    mad.lo.u32 %r8, %lane, 16, %r9;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];"""
BACK = "st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};"


def fragments(matrices, transposed):
    """Elements that each lane holds: `[lane, matrix, 2]`."""
    whole = matrices.transpose(0, 2, 1) if transposed else matrices
    return np.stack([whole[:, LANE // 4, 2 * (LANE % 4) + i].T for i in (0, 1)], 2)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    registers = ", ".join(f"%r{20 + i}" for i in range(count))
    body = f"""
        {FILL}
        st.shared.v4.b32 [%r8], {{%r1, %r2, %r3, %r4}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r8];"""
    body += "".join(f"st.global.b32 [%d1+{4 * i}], %r{20 + i};" for i in range(count))
    out = np.zeros((32, 4, 2), np.uint16)
    run_ptx(body, ROWS, out, shared=512)
    np.testing.assert_array_equal(out[:, :count], fragments(ROWS[:count], trans))
    assert not out[:, count:].any()


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, trans):
    registers = ", ".join(f"%r{1 + i}" for i in range(count))
    source = np.ascontiguousarray(fragments(ROWS, trans))
    body = f"""
        {FILL}
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r8], {{{registers}}};
        bar.sync 0;
        setp.lt.u32 %p1, %lane, {8 * count};
        @%p1 ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r8];
        @%p1 {BACK}"""
    out = np.zeros((4, 8, 8), np.uint16)
    run_ptx(body, source, out, shared=512)
    np.testing.assert_array_equal(out[:count], ROWS[:count])
    assert not out[count:].any()


def test_a_row_lies_where_its_lane_says():
    """Lane i gives the address of row i: here the rows from the last to the first."""
    body = f"""
        {FILL}
        st.shared.v4.b32 [%r8], {{%r1, %r2, %r3, %r4}};
        bar.sync 0;
        sub.u32 %r8, 31, %lane;
        mad.lo.u32 %r8, %r8, 16, %r9;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r8];
        {BACK}"""
    out = np.zeros((32, 4, 2), np.uint16)
    run_ptx(body, ROWS, out, shared=512)
    np.testing.assert_array_equal(out, fragments(ROWS[::-1, ::-1], False))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r8+8];", "misaligned row"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r8+16];", "out of bounds"),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r8+4], {%r1};", "misaligned row"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r8];", "matrix registers"),
        (
            "setp.lt.u32 %p1, %lane, 8; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r8];",
            "lanes 000000ff only",
        ),
    ],
    ids=["ldmatrix_misaligned", "ldmatrix_beyond", "stmatrix_misaligned", "registers", "some_lanes"],
)
def test_what_may_not_be_is_an_error_that_names_the_line(line, message):
    with pytest.raises(EmulationError, match=rf"PTX line \d+(.|\n)*{message}"):
        run_ptx(FILL + line, ROWS, np.zeros(256, np.uint16), shared=512)
