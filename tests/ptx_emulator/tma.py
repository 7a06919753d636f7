"""TMA in PTX, between the bytes of `%a1` and shared memory, and the bytes that it should move, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ptx_emulator.library import Box, tensor_map

# CU_TENSOR_MAP_DATA_TYPE_*
UINT8, UINT16, UINT32, INT32, FLOAT16, FLOAT32, BFLOAT16 = 0, 1, 2, 3, 6, 7, 9
_TYPES = {
    np.uint8: UINT8,
    np.uint16: UINT16,
    np.uint32: UINT32,
    np.int32: INT32,
    np.float16: FLOAT16,
    np.float32: FLOAT32,
}
WIDTHS = (0, 32, 64, 128)  # bytes of CU_TENSOR_MAP_SWIZZLE_*


def map_of(
    array: np.ndarray, box: Sequence[int], swizzle: int = 0, fill: int = 0, element_type: int | None = None
) -> bytes:
    """The tensor map of an array and a box in its order of dimensions; `swizzle`: the index of a width."""
    kind = _TYPES[array.dtype.type] if element_type is None else element_type
    return tensor_map(
        Box(
            address=array.ctypes.data,
            sizes=array.shape[::-1],
            strides=array.strides[:-1][::-1],
            box=box[::-1],
            swizzle=swizzle,
            element_type=kind,
            element_bytes=array.itemsize,
            fill=fill,
        )
    )


def box_of(array: np.ndarray, box: Sequence[int], at: Sequence[int], fill: float = 0) -> np.ndarray:
    """The elements of the box from `at` on; those outside of the array are `fill`."""
    out = np.full(box, fill, array.dtype)
    inside, of = [], []
    for size, start, length in zip(array.shape, at, box, strict=True):
        first, last = max(0, start), max(0, start, min(size, start + length))
        inside.append(slice(first, last))
        of.append(slice(first - start, max(first, last) - start))
    if all(s.start < s.stop for s in inside):
        out[tuple(of)] = array[tuple(inside)]
    return out


def swizzled(rows: np.ndarray, swizzle: int) -> np.ndarray:
    """Bytes `[row, width of the swizzle]` as they lie in shared memory.

    As in the CUDA programming guide: chunk x of 16 bytes of row y lies at x ^ y % 8 (128 bytes), x ^ y / 2 % 4
    (64 bytes), x ^ y / 4 % 2 (32 bytes).
    """
    if not swizzle:
        return rows.ravel()
    width = WIDTHS[swizzle]
    chunks = rows.reshape(len(rows), width // 16, 16)
    out = np.empty_like(chunks)
    every, period = {128: (1, 8), 64: (2, 4), 32: (4, 2)}[width]
    for y in range(len(chunks)):
        for x in range(width // 16):
            out[y, x ^ (y // every % period)] = chunks[y, x]
    return out.ravel()


BOX = 1024  # where in shared memory the box lies, behind the mbarrier
INIT = """
    setp.eq.u32 %p1, %tid, 0;
    @%p1 mbarrier.init.shared::cta.b64 [shared], 1;
    bar.sync 0;"""
WAIT = """
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [shared], 0;
    @!%p2 bra AGAIN;"""
_EACH = """
    mul.lo.u32 %r1, %tid, 16;
    mov.u32 %r3, %ntid.x;
    EACH:
    setp.ge.u32 %p3, %r1, {count};
    @%p3 bra DONE;
    mov.u32 %r2, shared;
    add.u32 %r2, %r2, %r1;
    cvt.u64.u32 %d1, %r1;
    add.u64 %d1, %d1, %a1;
    {copy}
    mad.lo.u32 %r1, %r3, 16, %r1;
    bra.uni EACH;
    DONE:"""
_OUT = """ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2+1024];
    st.global.v4.b32 [%d1], {%r4, %r5, %r6, %r7};"""
_IN = """ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d1];
    st.shared.v4.b32 [%r2+1024], {%r4, %r5, %r6, %r7};"""
FENCE = "fence.proxy.async.shared::cta;"
COMMIT = "@%p1 cp.async.bulk.commit_group;"
WRITTEN = "@%p1 cp.async.bulk.wait_group 0;"


def out_of_shared(count: int) -> str:
    """All threads load the box's bytes, and store them to `%a1`."""
    return _EACH.format(count=count, copy=_OUT)


def into_shared(count: int) -> str:
    return _EACH.format(count=count, copy=_IN)


def load(at: Sequence[int], count: int, to: int = BOX) -> str:
    """Thread 0 loads the box of `%a0` at these coordinates; `count`: bytes that the mbarrier expects."""
    kind = f"cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    where = ", ".join(map(str, at[::-1]))
    return f"""
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [shared], {count};
        @%p1 {kind} [shared+{to}], [%a0, {{{where}}}], [shared];"""


def gather(rows: Sequence[int], column: int, count: int, to: int = BOX) -> str:
    """Thread 0 loads rows of `%a0`, four at a time, from this column on; `count`: bytes in all."""
    kind = "cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes"
    fours = [", ".join(map(str, rows[i : i + 4])) for i in range(0, len(rows), 4)]
    place = [to + i * count // len(fours) for i in range(len(fours))]
    return f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [shared], {count};" + "".join(
        f"@%p1 {kind} [shared+{where}], [%a0, {{{column}, {four}}}], [shared];"
        for where, four in zip(place, fours, strict=True)
    )


def store(at: Sequence[int], reduction: str = "", of: int = BOX) -> str:
    name = f"cp.reduce.async.bulk.tensor.{len(at)}d" if reduction else f"cp.async.bulk.tensor.{len(at)}d"
    where = ", ".join(map(str, at[::-1]))
    return f"@%p1 {name}.global.shared::cta{reduction}.bulk_group [%a0, {{{where}}}], [shared+{of}];"
