"""Kernels for sm_100 with operands or accumulators in tensor memory in every layout: in Triton, and in Gluon by hand.

Each `check_...` launches one and compares with PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_emulator.known_kernels import assert_product
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@triton.jit
def _chained(q_ptr, k_ptr, v_ptr, out_ptr, scale, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :])
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        at = n[:, None] * D + d[None, :]
        p = tl.dot(q, tl.load(k_ptr + at).T) * scale
        acc = tl.dot(p.to(v_ptr.dtype.element_ty), tl.load(v_ptr + at), acc)
    tl.store(out_ptr + m[:, None] * D + d[None, :], acc)


def check_chained(dtype: torch.dtype, BM: int, BN: int, D: int, warps: int, stages: int) -> None:
    """Attention without a softmax: the first product, rounded, is the left operand of the second."""
    M, N = 2 * BM, 4 * BN
    q, k, v = (torch.randn(rows, D).to(dtype) for rows in (M, N, N))
    out = torch.full((M, D), float("nan"))
    _chained[(2,)](q, k, v, out, D**-0.5, N, D, BM, BN, num_warps=warps, num_stages=stages)
    assert_product(out, (q.double() @ k.double().T * D**-0.5).to(dtype), v, 5e-3)


@triton.jit
def _half_sums(a_ptr, b_ptr, c_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float16)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + m * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * BN + n)
        acc = tl.dot(a, b, acc, out_dtype=tl.float16)
    tl.store(c_ptr + m * BN + n, acc)


def check_half_sums(BM: int, BN: int, warps: int) -> None:
    K = 128
    a, b = torch.randn(BM, K).half(), torch.randn(K, BN).half()
    c = torch.full((BM, BN), float("nan"), dtype=torch.float16)
    _half_sums[(1,)](a, b, c, K, BM, BN, 32, num_warps=warps)
    assert_product(c, a, b, 2e-3)


@triton.jit
def _two_products(a1_ptr, a2_ptr, b1_ptr, b2_ptr, c_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        a_at, b_at = m * K + start + k[None, :], (start + k[:, None]) * BN + n
        acc = tl.dot(tl.load(a1_ptr + a_at), tl.load(b1_ptr + b_at), acc)
        acc = tl.dot(tl.load(a2_ptr + a_at), tl.load(b2_ptr + b_at), acc)
    tl.store(c_ptr + m * BN + n, acc)


def check_two_products(BM: int, stages: int) -> None:
    """Two products a step with one accumulator: https://github.com/triton-lang/triton/issues/10821"""
    K, BN = 256, 64
    a1, a2 = (torch.randn(BM, K).bfloat16() for _ in range(2))
    b1, b2 = (torch.randn(K, BN).bfloat16() for _ in range(2))
    c = torch.full((BM, BN), float("nan"))
    _two_products[(1,)](a1, a2, b1, b2, c, K, BM, BN, 64, num_warps=4, num_stages=stages)
    assert_product(c, torch.cat([a1, a2], 1), torch.cat([b1, b2]), 1e-5)


@triton.jit
def _scaled(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k, group = start + tl.arange(0, BK)[None, :], start // 32 + tl.arange(0, BK // 32)[None, :]
        a_scale, b_scale = tl.load(a_scale_ptr + m * (K // 32) + group), tl.load(b_scale_ptr + n * (K // 32) + group)
        a, b = tl.load(a_ptr + m * K + k), tl.load(b_ptr + n * K + k)
        acc = tl.dot_scaled(a, a_scale, "e4m3", b.T, b_scale, "e4m3", acc)
    tl.store(c_ptr + m * N + tl.reshape(n, (1, BN)), acc)


def _mxfp8(rows: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and a power of two for 32 of its elements along K."""
    return torch.randn(rows, K).to(torch.float8_e4m3fn), torch.randint(120, 135, (rows, K // 32), dtype=torch.uint8)


def _dequantized(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return matrix.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


def check_scaled(BN: int, BK: int, warps: int) -> None:
    M, N, K, BM = 256, 2 * BN, 256, 128
    (a, a_scale), (b, b_scale) = _mxfp8(M, K), _mxfp8(N, K)
    c = torch.full((M, N), float("nan"))
    _scaled[(2, 2)](a, a_scale, b, b_scale, c, N, K, BM, BN, BK, num_warps=warps)
    assert_product(c, _dequantized(a, a_scale), _dequantized(b, b_scale).T, 1e-6)


@gluon.jit
def _scales(ptr, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """`[128 * CHUNKS, 4]` in shared memory, as tcgen05.cp takes them."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=1)
    values = gl.load(ptr + gl.arange(0, 512 * CHUNKS, layout))
    chunks = gl.allocate_shared_memory(gl.uint8, [512 * CHUNKS], shared, values).reshape((CHUNKS, 1, 32, 4, 4))
    return chunks.permute((0, 3, 2, 1, 4)).reshape((128 * CHUNKS, 4))


@gluon.jit
def _copied_scales(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, N: gl.constexpr, SHARED: gl.constexpr, WARPS: gl.constexpr
):
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    k = gl.arange(0, 128, gl.SliceLayout(0, flat))[None, :]
    m, n = gl.arange(0, 128, gl.SliceLayout(1, flat))[:, None], gl.arange(0, N, gl.SliceLayout(1, flat))[:, None]
    a = gl.allocate_shared_memory(gl.float8e4nv, [128, 128], SHARED, gl.load(a_ptr + m * 128 + k))
    b = gl.allocate_shared_memory(gl.float8e4nv, [N, 128], SHARED, gl.load(b_ptr + n * 128 + k)).permute((1, 0))
    layout: gl.constexpr = TensorMemoryLayout((128, N), col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [128, N], layout)
    b_scale = allocate_tensor_memory(gl.uint8, [N, 4], TensorMemoryScalesLayout())
    a_scale = allocate_tensor_memory(gl.uint8, [128, 4], TensorMemoryScalesLayout())
    a_scales, b_scales = _scales(a_scale_ptr, 1, WARPS), _scales(b_scale_ptr, N // 128, WARPS)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    tcgen05_copy(a_scales, a_scale)
    tcgen05_copy(b_scales, b_scale)
    tcgen05_mma_scaled(a, b, acc, a_scale, b_scale, "e4m3", "e4m3", use_acc=False)
    tcgen05_commit(bar)
    mbarrier.wait(bar, phase=0)
    mbarrier.invalidate(bar)
    out_of: gl.constexpr = get_tmem_reg_layout(gl.float32, (128, N), layout, WARPS)
    m, n = gl.arange(0, 128, gl.SliceLayout(1, out_of)), gl.arange(0, N, gl.SliceLayout(0, out_of))
    gl.store(c_ptr + m[:, None] * N + n[None, :], acc.load(out_of))


def _chunks(scale: torch.Tensor) -> torch.Tensor:
    """512 bytes for 128 rows and 4 steps along K: row r lies beside r % 32."""
    return scale.view(-1, 4, 32, 4).transpose(1, 2).contiguous()


def check_copied_scales(N: int, warps: int) -> None:
    (a, a_scale), (b, b_scale) = _mxfp8(128, 128), _mxfp8(N, 128)
    c = torch.full((128, N), float("nan"))
    shared = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    _copied_scales[(1,)](a, _chunks(a_scale), b, _chunks(b_scale), c, N, shared, warps, num_warps=warps)
    assert_product(c, _dequantized(a, a_scale), _dequantized(b, b_scale).T, 1e-6)


@gluon.jit
def _copy(
    x_ptr, out_ptr, M: gl.constexpr, N: gl.constexpr, DTYPE: gl.constexpr, STRIDE: gl.constexpr,
    STORE: gl.constexpr, LOAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = TensorMemoryLayout((M, N), col_stride=STRIDE)
    memory = allocate_tensor_memory(DTYPE, [M, N], layout)
    into: gl.constexpr = get_tmem_reg_layout(DTYPE, (M, N), layout, WARPS, STORE)
    out_of: gl.constexpr = get_tmem_reg_layout(DTYPE, (M, N), layout, WARPS, LOAD)
    m, n = gl.arange(0, M, gl.SliceLayout(1, into)), gl.arange(0, N, gl.SliceLayout(0, into))
    memory.store(gl.load(x_ptr + m[:, None] * N + n[None, :]))
    m, n = gl.arange(0, M, gl.SliceLayout(1, out_of)), gl.arange(0, N, gl.SliceLayout(0, out_of))
    gl.store(out_ptr + m[:, None] * N + n[None, :], memory.load(out_of))


def check_copy(dtype: torch.dtype, stride: int, M: int, N: int, store: str, load: str, warps: int) -> None:
    """Copy into tensor memory by one shape of instruction, and out of it by another one."""
    x = torch.randn(M, N).to(dtype)
    out = torch.full_like(x, float("nan"))
    _copy[(1,)](x, out, M, N, _GLUON[dtype], stride, store, load, warps, num_warps=warps)
    assert torch.equal(out, x)


@gluon.jit
def _product(
    a_ptr, b_ptr, c_ptr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, DTYPE: gl.constexpr,
    SHARED: gl.constexpr, A_KM: gl.constexpr, B_NK: gl.constexpr, A_IN_TENSOR: gl.constexpr, LOAD: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    column: gl.constexpr = gl.SliceLayout(1, flat)
    row: gl.constexpr = gl.SliceLayout(0, flat)
    if B_NK:
        at = gl.arange(0, N, column)[:, None] * K + gl.arange(0, K, row)[None, :]
        b = gl.allocate_shared_memory(DTYPE, [N, K], SHARED, gl.load(b_ptr + at)).permute((1, 0))
    else:
        at = gl.arange(0, K, column)[:, None] * N + gl.arange(0, N, row)[None, :]
        b = gl.allocate_shared_memory(DTYPE, [K, N], SHARED, gl.load(b_ptr + at))
    layout: gl.constexpr = TensorMemoryLayout((M, N), col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [M, N], layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    if A_IN_TENSOR:
        a_layout: gl.constexpr = TensorMemoryLayout((M, K), col_stride=1)
        a = allocate_tensor_memory(DTYPE, [M, K], a_layout)
        into: gl.constexpr = get_tmem_reg_layout(DTYPE, (M, K), a_layout, WARPS)
        m, k = gl.arange(0, M, gl.SliceLayout(1, into)), gl.arange(0, K, gl.SliceLayout(0, into))
        a.store(gl.load(a_ptr + m[:, None] * K + k[None, :]))
    elif A_KM:
        at = gl.arange(0, K, column)[:, None] * M + gl.arange(0, M, row)[None, :]
        a = gl.allocate_shared_memory(DTYPE, [K, M], SHARED, gl.load(a_ptr + at)).permute((1, 0))
    else:
        at = gl.arange(0, M, column)[:, None] * K + gl.arange(0, K, row)[None, :]
        a = gl.allocate_shared_memory(DTYPE, [M, K], SHARED, gl.load(a_ptr + at))
    fence_async_shared()
    tcgen05_mma(a, b, acc, use_acc=False)
    tcgen05_commit(bar)
    mbarrier.wait(bar, phase=0)
    mbarrier.invalidate(bar)
    out_of: gl.constexpr = get_tmem_reg_layout(gl.float32, (M, N), layout, WARPS, LOAD)
    m, n = gl.arange(0, M, gl.SliceLayout(1, out_of)), gl.arange(0, N, gl.SliceLayout(0, out_of))
    gl.store(c_ptr + m[:, None] * N + n[None, :], acc.load(out_of))


def check_product(
    dtype: torch.dtype, M: int, N: int, swizzle: int, a_km: bool, b_nk: bool, a_in_tensor: bool = False,
    load: str = "32x32b",
) -> None:  # fmt: skip
    """`a_km`: A lies K by M; `b_nk`: B lies N by K."""
    K = 64
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    shared = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=2)
    c = torch.full((M, N), float("nan"))
    x, y = (a.T.contiguous() if a_km else a), (b.T.contiguous() if b_nk else b)
    _product[(1,)](x, y, c, M, N, K, _GLUON[dtype], shared, a_km, b_nk, a_in_tensor, load, 4, num_warps=4)
    assert_product(c, a, b, 2e-3 if dtype == torch.float32 else 1e-6)
