"""A product of 8-bit floats with scale factors in PTX: tcgen05.cp brings the factors to tensor memory, tcgen05.mma uses
them. Layouts as in the PTX ISA's chapter on tcgen05.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ptx_emulator import wgmma
from ptx_emulator.library import Order
from ptx_emulator.ptx import ORDERS, quarters, run_ptx

BASE = 1024  # the address of shared memory's first byte
ROWS, DEPTH = 128, 32
VERSION = 1 << 46
TYPES = {"e4m3": 0, "e5m2": 1}
# What orders tensor memory between warps
BARRIER = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"


@dataclass
class Chunks:
    """Scale factors in shared memory: 512 bytes for 128 rows of A or columns of B, and 4 steps along K."""

    data: np.ndarray
    start: int

    @staticmethod
    def of(factors: np.ndarray, start: int) -> Chunks:
        """`factors`: `[rows, steps]` of bytes. Those of rows 32, 64 and 96 on go beside those of the first 32."""
        rows, steps = factors.shape
        data = np.full((-(-rows // 128), 32, 4, 4), 0xFF, np.uint8)
        for row in range(rows):
            data[row // 128, row % 32, row % 128 // 32, :steps] = factors[row]
        flat = data.reshape(-1)
        return Chunks(np.append(flat, np.zeros(-len(flat) % 1024, np.uint8)), start)

    def descriptor(self, chunk: int) -> int:
        return self.start + 512 * chunk >> 4 | 128 >> 4 << 32 | VERSION


def instruction_descriptor(n: int, kinds: tuple[str, str], mn: tuple[bool, bool], factor: tuple[int, int]) -> int:
    """Of kind::mxf8f6f4 with 128 rows; `factor`: which bytes of the words hold the scale factors of A and of B."""
    types = TYPES[kinds[0]] << 7 | TYPES[kinds[1]] << 10
    return factor[1] << 4 | types | mn[0] << 15 | mn[1] << 16 | n // 8 << 17 | 1 << 23 | 1 << 27 | factor[0] << 29


class ScaledProduct:
    """D = sum over k of A_k B_k^T, with a power of two for each row of A_k and of B_k. A test may replace its steps.

    `factors`: exponents `[rows, steps]` of A and of B. Tensor memory has D, then the factors of A, then those of B.
    """

    def __init__(
        self,
        n: int = 48,
        steps: int = 1,
        kinds: tuple[str, str] = ("e4m3", "e4m3"),
        swizzles: tuple[int, int] = (3, 3),
        mn: tuple[bool, bool] = (False, False),
        factors: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        rng = np.random.default_rng(n + steps)
        self.n, self.steps, self.kinds, self.mn = n, steps, kinds, mn
        self.a, self.b = (rng.integers(-3, 4, (rows, steps * DEPTH)).astype(np.float32) for rows in (ROWS, n))
        if factors is None:
            factors = rng.integers(-3, 4, (ROWS, steps)), rng.integers(-3, 4, (n, steps))
        self.factors = factors
        at = BASE
        self.parts = []
        for matrix, kind, swizzle, transposed in zip((self.a, self.b), kinds, swizzles, mn, strict=True):
            self.parts.append(wgmma.Operand(quarters(matrix, kind), swizzle, transposed, at))
            at += len(self.parts[-1].data)
        for exponents in factors:
            self.parts.append(Chunks.of((exponents + 127).astype(np.uint8), at))
            at += len(self.parts[-1].data)
        self.table, self.bar = at - BASE, at - BASE + 8
        self.columns = 512 if n > 128 else 256
        self.a_factors = 32 * (-(-n // 32))
        self.b_factors = self.a_factors + 4
        self.write_steps()

    def write_steps(self) -> None:
        bar = f"[shared+{self.bar}]"
        self.init = f"@%p2 mbarrier.init.shared::cta.b64 {bar}, 1;"
        self.fence = "fence.proxy.async.shared::cta;"
        self.meet = "bar.sync 0;"
        self.prepare = ""
        self.copy_a = self.copy(2, 0, self.a_factors)
        self.copy_b = "".join(self.copy(3, c, self.b_factors + 4 * c) for c in range(-(-self.n // 128)))
        self.mma = "".join(self.multiply(k) for k in range(self.steps))
        self.commit = f"@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 {bar};"
        self.wait = f"AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p5, {bar}, 0; @!%p5 bra AGAIN;"
        self.end = "bar.sync 0;"

    def copy(self, part: int, chunk: int, column: int) -> str:
        """Factors of A (part 2) or B (part 3) to tensor memory from this column on."""
        descriptor = self.parts[part].descriptor(chunk)
        return f"""mov.b64 %d12, {descriptor}; add.u32 %r8, %r4, {column};
            @%p2 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r8], %d12;"""

    def multiply(self, k: int, factor: tuple[int, int] | None = None, a: str = "%d8") -> str:
        """One step along K; it writes D if it is the first."""
        left, right = (part.descriptor(k * DEPTH) | VERSION for part in self.parts[:2])
        name = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X"
        return f"""mov.b64 %d8, {left}; mov.b64 %d10, {right};
            mov.b32 %r9, {instruction_descriptor(self.n, self.kinds, self.mn, factor or (k, k))};
            setp.ne.s32 %p4, {k}, 0; add.u32 %r7, %r4, {self.a_factors}; add.u32 %r8, %r4, {self.b_factors};
            @%p2 {name} [%r4], {a}, %d10, %r9, [%r7], [%r8], %p4;"""

    def expected(self) -> np.ndarray:
        total = np.zeros((ROWS, self.n))
        for k in range(self.steps):
            a, b = (matrix[:, k * DEPTH : (k + 1) * DEPTH].astype(np.float64) for matrix in (self.a, self.b))
            row, column = (2.0 ** exponents[:, k].astype(np.float64) for exponents in self.factors)
            total += a @ b.T * row[:, None] * column
        return total

    def text(self) -> str:
        listed = "{" + ", ".join(f"%f{i}" for i in range(16)) + "}"
        loads = ""
        for column in range(0, self.n, 16):
            loads += f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {listed}, [%r5+{column}]; tcgen05.wait::ld.sync.aligned;"
            loads += "".join(f"st.global.b32 [%d11+{4 * (column + i)}], %f{i};" for i in range(16))
        return f"""
            setp.lt.u32 %p1, %tid, 32;
            setp.eq.u32 %p2, %tid, 0;
            {"".join(wgmma.filled(k, part, BASE) for k, part in enumerate(self.parts))}
            @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [shared+{self.table}], {self.columns};
            {self.init} {self.fence} {self.meet}
            ld.shared.b32 %r4, [shared+{self.table}];
            and.b32 %r5, %tid, 96;
            shl.b32 %r5, %r5, 16;
            add.u32 %r5, %r5, %r4;
            {self.prepare} {self.copy_a} {self.copy_b} {self.mma} {self.commit} {self.wait}
            tcgen05.fence::after_thread_sync;
            mad.wide.u32 %d11, %tid, {4 * self.n}, %a{len(self.parts) + 1};
            {loads} {self.end}
            @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, {self.columns};"""

    def run(self, orders: Sequence[Order] = ORDERS) -> np.ndarray:
        """`[lane, column]` of D. The parameter after the parts has A as rows of bytes."""
        out = np.zeros((ROWS, self.n), np.float32)
        data = [part.data for part in self.parts]
        rows = np.ascontiguousarray(quarters(self.a, self.kinds[0]))
        shared = self.bar + 8
        run_ptx(self.text(), *data, rows, out, target="sm_100", threads=128, shared=shared, orders=orders)
        return out

    def check(self) -> None:
        np.testing.assert_array_equal(self.run(), self.expected())
