"""Triton kernels that are right on real GPUs: small versions of those in Triton's tutorials and tests.

Each `check_...` launches one and compares with PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

Blocks = tuple[int, int, int]
# Allowed errors, relative to |a| @ |b|.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-3}
_OF_BYTES = 1e-6  # the operands are exact, and the result is in fp32


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) + tl.load(y_ptr + at, mask=mask), mask=mask)


def check_add() -> None:
    x, y, out = torch.randn(1003), torch.randn(1003), torch.full((1003,), 7.0)
    _add[(triton.cdiv(1003, 256),)](x, y, out, 1003, 256)
    assert torch.equal(out, x + y)


@triton.jit
def _softmax(x_ptr, out_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * stride + at, e / tl.sum(e, 0), mask=at < n)


def check_softmax(n: int, warps: int) -> None:
    x, out = torch.randn(5, n), torch.zeros(5, n)
    _softmax[(5,)](x, out, n, n, triton.next_power_of_2(n), num_warps=warps)
    torch.testing.assert_close(out, x.softmax(1))


@triton.jit
def _matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a_mask, b_mask = (m[:, None] < M) & (k[None, :] < K), (k[:, None] < K) & (n[None, :] < N)
        a = tl.load(a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    c_mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_ptr + m[:, None] * stride_cm + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=c_mask)


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A random matrix; `layout`: "r" for contiguous rows, "c" for contiguous columns."""
    return torch.randn(rows, columns).to(dtype) if layout == "r" else torch.randn(columns, rows).to(dtype).T


def result(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """For the product of matrices of this type: NaNs, in fp32 if the type has 8 bits."""
    return torch.full((rows, columns), float("nan"), dtype=torch.float32 if dtype.itemsize == 1 else dtype)


def assert_product(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    error = (c.double() - a.double() @ b.double()).abs() / (a.double().abs() @ b.double().abs())
    assert error.max() < tolerance


def check_matmul(
    dtype: torch.dtype, layouts: str, blocks: Blocks, warps: int, stages: int, precision: str = "tf32"
) -> None:
    M, N, K = 144, 176, 160
    a, b = matrix(M, K, dtype, layouts[0]), matrix(K, N, dtype, layouts[1])
    c = result(M, N, dtype)
    grid = (triton.cdiv(M, blocks[0]), triton.cdiv(N, blocks[1]))
    launch = {"num_warps": warps, "num_stages": stages}
    _matmul[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), c.stride(0), *blocks, precision, **launch)
    assert_product(c, a, b, 1e-6 if precision == "ieee" else _TOLERANCE.get(dtype, _OF_BYTES))


@triton.jit
def _matmul_tma(
    a_desc, b_desc, c_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B_NK: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile // tiles_n * BM, tile % tiles_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = a_desc.load([m, k])
            b = b_desc.load([n, k]).T if B_NK else b_desc.load([k, n])
            acc = tl.dot(a, b, acc)
        c_desc.store([m, n], acc.to(c_desc.dtype))


def check_matmul_tma(dtype: torch.dtype, blocks: Blocks, warps: int, stages: int, b_nk: bool, flatten: bool) -> None:
    """A persistent kernel with 3 programs."""
    M, N, K = 200, 176, 160
    BM, BN, BK = blocks
    a, b = matrix(M, K, dtype, "r"), matrix(K, N, dtype, "c" if b_nk else "r")
    c = result(M, N, dtype)
    descriptors = [
        TensorDescriptor.from_tensor(a, [BM, BK]),
        TensorDescriptor.from_tensor(b.T, [BN, BK]) if b_nk else TensorDescriptor.from_tensor(b, [BK, BN]),
        TensorDescriptor.from_tensor(c, [BM, BN]),
    ]
    _matmul_tma[(3,)](*descriptors, M, N, K, *blocks, b_nk, flatten, num_warps=warps, num_stages=stages)
    assert_product(c, a, b, _TOLERANCE.get(dtype, _OF_BYTES))


@triton.jit
def _split_k(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    a = tl.load(a_ptr + m * K + k[None, :], mask=m < M, other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + n, mask=n < N, other=0.0)
    tl.atomic_add(c_ptr + m * N + n, tl.dot(a, b), mask=(m < M) & (n < N))


def check_split_k(warps: int) -> None:
    """Integers, whose sums are the same in any order."""
    a, b, c = torch.randint(-4, 5, (40, 64)).half(), torch.randint(-4, 5, (64, 48)).half(), torch.zeros(40, 48)
    _split_k[(2, 2, 4)](a, b, c, 40, 48, 64, 32, 32, 16, num_warps=warps)
    assert torch.equal(c, a.float() @ b.float())


@triton.jit
def _permutations(x_ptr, histogram_ptr, scan_ptr, gather_ptr, sort_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(histogram_ptr + tl.arange(0, 64), tl.histogram(x, 64))
    tl.store(scan_ptr + at, tl.cumsum(x, 0))
    tl.store(gather_ptr + at, tl.gather(x, (at * 7 + 3) % BLOCK, 0))
    tl.store(sort_ptr + at, tl.sort(x))


def check_permutations(block: int, warps: int) -> None:
    x = torch.randint(0, 64, (block,), dtype=torch.int32)
    histogram, (scan, gather, sort) = torch.zeros(64, dtype=torch.int32), torch.zeros(3, block, dtype=torch.int32)
    _permutations[(1,)](x, histogram, scan, gather, sort, block, num_warps=warps)
    assert torch.equal(histogram, torch.bincount(x, minlength=64).int())
    assert torch.equal(scan, x.cumsum(0).int())
    assert torch.equal(gather, x[(torch.arange(block) * 7 + 3) % block])
    assert torch.equal(sort, x.sort().values)


@triton.jit
def _atomics(x_ptr, total_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr + at % 3, tl.load(x_ptr + at))


def check_atomics() -> None:
    x, total = torch.randint(0, 9, (1024,)).float(), torch.zeros(3)
    _atomics[(8,)](x, total, 128)
    assert torch.equal(total, torch.stack([x[i::3].sum() for i in range(3)]))


@triton.jit
def _tickets(tickets_ptr):
    ticket = tl.atomic_add(tickets_ptr, 1)
    tl.store(tickets_ptr + 1 + ticket, tl.program_id(0))


def check_tickets() -> list[int]:
    """Return the order in which programs came, which is different in every order of execution."""
    tickets = torch.zeros(9, dtype=torch.int32)
    _tickets[(8,)](tickets)
    assert tickets[0] == 8
    assert sorted(tickets[1:].tolist()) == list(range(8))
    return tickets[1:].tolist()


@triton.jit
def _reduce_tma(x_desc, y_desc, BM: tl.constexpr):
    y_desc.atomic_add([0, 0], x_desc.load([tl.program_id(0) * BM, 0]))


def check_reduce_tma() -> None:
    x, y = torch.randint(0, 9, (128, 64)).float(), torch.ones(32, 64)
    expected = y + x.view(4, 32, 64).sum(0)
    _reduce_tma[(4,)](TensorDescriptor.from_tensor(x, [32, 64]), TensorDescriptor.from_tensor(y, [32, 64]), 32)
    assert torch.equal(y, expected)


@triton.jit
def _device_descriptors(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BM, BN])
    y_desc = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BM, BN])
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    y_desc.store(at, x_desc.load(at) * 2)


def check_device_descriptors() -> None:
    triton.set_allocator(lambda size, align, _stream: torch.empty(size + align, dtype=torch.int8))
    x, y = torch.randn(100, 80), torch.zeros(100, 80)
    _device_descriptors[(4, 3)](x, y, 100, 80, 32, 32)
    assert torch.equal(y, 2 * x)
