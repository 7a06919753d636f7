"""wgmma in PTX, and its operands in shared memory as CUTLASS's canonical layouts place them.

In `make_gmma_desc` of cute/arch/mma_sm90_desc.hpp, K major: Swizzle o ((8, n), 2):((width, SBO), 16 bytes or LBO);
MN major: ((width, n), (8, k)):((1, LBO), (width, SBO)), and without a swizzle SBO and LBO the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ptx_emulator.tma import WIDTHS

# Bits 62 and 63 of a descriptor, by the bytes of the swizzle.
_MODES = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """The descriptor of shared memory from byte `start` on; offsets in bytes; `swizzle`: the index of a width."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | _MODES[WIDTHS[swizzle]] << 62


class Operand:
    """A matrix `[mn, k]` in shared memory, with the descriptor of each step of `depth` columns."""

    def __init__(self, matrix: np.ndarray, swizzle: int, mn_major: bool, start: int) -> None:
        self.width = WIDTHS[swizzle] or 16
        self.swizzle, self.mn_major, self.start = swizzle, mn_major, start
        self.item = matrix.itemsize
        mn, k = matrix.shape
        # Both strides have gaps of different sizes, so that a test fails if one is taken for the other.
        eights_mn, eights_k = -(-mn // 8), -(-k // 8)
        if swizzle:
            self.stride = 8 * self.width + 1024
            self.leading = eights_k * self.stride + 1024
        elif mn_major:
            self.leading, self.stride = 256, eights_k * 256 + 128
        else:
            self.stride, self.leading = 256, eights_mn * 256 + 128
        self.data = np.full(1 << 16, 0xFF, np.uint8)
        flat = matrix.view(np.uint8).reshape(mn, k, self.item)
        last = 0
        for row in range(mn):
            for column in range(k):
                at = self._place(row, column)
                self.data[at : at + self.item] = flat[row, column]
                last = max(last, at + self.item)
        self.data = self.data[: -(-last // 1024) * 1024]

    def _place(self, mn: int, k: int) -> int:
        """The byte of an element, from the first of the operand on."""
        width, item = self.width, self.item
        if self.mn_major:
            across, inside = divmod(mn * item, width)
            eights, row = divmod(k, 8)
            if not self.swizzle:
                return across * self.stride + eights * self.leading + row * 16 + inside
            start = across * self.leading + eights * self.stride
        else:
            eights, row = divmod(mn, 8)
            if not self.swizzle:
                across, inside = divmod(k * item, 16)
                return eights * self.stride + across * self.leading + row * 16 + inside
            inside = k * item
            start = eights * self.stride
        # Within 8 rows of `width` bytes, chunk x of row y lies at x ^ y (128 bytes), y / 2 (64), y / 4 (32).
        chunk = inside // 16 ^ row * width // 128
        return start + row * width + chunk * 16 + inside % 16

    def descriptor(self, k: int) -> int:
        """The descriptor from column k on."""
        if self.mn_major:
            step = k // 8 * (self.stride if self.swizzle else self.leading)
        else:
            step = k * self.item if self.swizzle else k * self.item // 16 * self.leading
        return descriptor(self.start + step, self.leading, self.stride, self.swizzle)


def filled(parameter: int, operand: Operand, base: int) -> str:
    """128 threads copy an operand from a parameter to shared memory."""
    label = f"FILL{parameter}"
    return f"""
        mul.lo.u32 %r1, %tid, 16;
        {label}:
        setp.ge.u32 %p3, %r1, {len(operand.data)};
        @%p3 bra {label}_DONE;
        mov.u32 %r2, shared;
        add.u32 %r2, %r2, %r1;
        cvt.u64.u32 %d1, %r1;
        add.u64 %d1, %d1, %a{parameter};
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d1];
        st.shared.v4.b32 [%r2+{operand.start - base}], {{%r4, %r5, %r6, %r7}};
        add.u32 %r1, %r1, 2048;
        bra.uni {label};
        {label}_DONE:"""


def listed(registers: Sequence[str]) -> str:
    return "{" + ", ".join(registers) + "}"


def fragment_d(d: np.ndarray) -> np.ndarray:
    """`[thread, register]` of a result: 16 rows a warp, each laid out as by mma.sync."""
    thread = np.arange(128)
    return np.stack(
        [
            d[thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (thread % 4) + i % 2]
            for i in range(d.shape[1] // 2)
        ],
        1,
    )
