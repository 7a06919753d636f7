"""Kernels for sm_100 that are right, executed in every order, and two for which Triton 3.7 makes wrong code."""

import re

import pytest
import torch
from ptx_emulator import known_kernels, known_tensor_memory
from ptx_emulator.driver import gpu
from ptx_emulator.library import EmulationError
from ptx_emulator.test_known_kernels import DTYPES, cells

BF16, FP16, FP32 = "bf16", "fp16", "fp32"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("dtype", "BM", "BN", "D", "warps", "stages"),
    cells(
        [
            (dtype, *size)
            for dtype in (BF16, FP16)
            for size in ((128, 64, 64, 4, 2), (128, 128, 64, 8, 3), (64, 64, 64, 4, 2), (128, 64, 128, 4, 1))
        ],
        {"bf16-64-64-64-4-2"},
    ),
)
def test_chained_products(dtype, BM, BN, D, warps, stages):
    with gpu("sm_100"):
        known_tensor_memory.check_chained(DTYPES[dtype], BM, BN, D, warps, stages)


@pytest.mark.parametrize(("BM", "BN", "warps"), cells([(128, 64, 4), (64, 64, 4), (128, 128, 8)], {"64-64-4"}))
def test_sums_in_fp16(BM, BN, warps):
    with gpu("sm_100"):
        known_tensor_memory.check_half_sums(BM, BN, warps)


SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b")
COPIES = [
    (dtype, stride, M, N, store, load, warps)
    for dtype, stride in ((FP32, 1), (BF16, 1), (BF16, 2))
    for M, N in ((128, 64), (64, 64), (128, 256))
    for warps in (4, 8)
    for store, load in (*((shape, "32x32b") for shape in SHAPES), *(("32x32b", shape) for shape in SHAPES[1:]))
]


@pytest.mark.parametrize(
    ("dtype", "stride", "M", "N", "store", "load", "warps"),
    cells(COPIES, {"fp32-1-64-64-16x64b-32x32b-4", "bf16-2-128-64-32x32b-16x256b-8"}),
)
def test_copies(dtype, stride, M, N, store, load, warps):
    with gpu("sm_100"):
        known_tensor_memory.check_copy(DTYPES[dtype], stride, M, N, store, load, warps)


def is_possible(dtype, N, swizzle, a_km, b_nk):
    """fp32 must lie K-major, and a row of B is as wide as its swizzle."""
    if dtype == FP32 and (a_km or not b_nk):
        return False
    return b_nk or N * DTYPES[dtype].itemsize >= swizzle


PRODUCTS = [
    (dtype, M, N, swizzle, a_layout, b_layout)
    for dtype in DTYPES
    for M in (64, 128)
    for N in (16, 64, 256)
    for swizzle in (32, 64, 128)
    for a_layout in ("mk", "km")
    for b_layout in ("nk", "kn")
    if is_possible(dtype, N, swizzle, a_layout == "km", b_layout == "nk")
]


@pytest.mark.parametrize(
    ("dtype", "M", "N", "swizzle", "a_layout", "b_layout"),
    cells(PRODUCTS, {"bf16-128-64-128-km-kn", "fp16-64-16-32-mk-nk", "fp32-128-16-64-mk-nk"}),
)
def test_products(dtype, M, N, swizzle, a_layout, b_layout):
    with gpu("sm_100"):
        known_tensor_memory.check_product(DTYPES[dtype], M, N, swizzle, a_layout == "km", b_layout == "nk")


@pytest.mark.parametrize(
    ("dtype", "M"), cells([(dtype, M) for dtype in DTYPES for M in (64, 128)], {"bf16-64", "fp32-128"})
)
def test_products_of_tensor_memory(dtype, M):
    with gpu("sm_100"):
        known_tensor_memory.check_product(DTYPES[dtype], M, 64, 128, False, True, a_in_tensor=True)
        known_tensor_memory.check_product(DTYPES[dtype], M, 64, 128, False, True, load="16x256b")


@pytest.mark.parametrize(
    ("BN", "BK", "warps"), cells([(128, 128, 4), (128, 128, 8), (256, 128, 8), (64, 128, 4)], {"128-128-4"})
)
def test_scaled_products(BN, BK, warps):
    with gpu("sm_100"):
        known_tensor_memory.check_scaled(BN, BK, warps)


@pytest.mark.parametrize(("N", "warps"), cells([(128, 4), (256, 4), (256, 8)], {"256-4"}))
def test_copied_scales(N, warps):
    with gpu("sm_100"):
        known_tensor_memory.check_copied_scales(N, warps)


COPY = r"@%p\d+ tcgen05\.cp[^;]*;"


@pytest.mark.parametrize(
    ("pattern", "which", "message"),
    [
        (COPY, 0, "UNWRITTEN: an operand in tensor memory"),
        (COPY, 1, "UNWRITTEN: an operand in tensor memory"),
        (COPY, 2, "UNWRITTEN: an operand in tensor memory"),
        (r"fence\.proxy\.async[^;]*;", 0, "PROXY(.|\n)*tcgen05.cp"),
        (r"@%p\d+ tcgen05\.commit[^;]*;", 0, "Deadlock"),
    ],
    ids=["copy_0", "copy_1", "copy_2", "fence", "commit"],
)
def test_a_missing_instruction_of_a_scaled_product_is_noticed(pattern, which, message):
    """One copy is for the left operand, two for the 256 columns of the right one."""

    def mutate(_, ptx):
        found = list(re.finditer(pattern, ptx))
        assert len(found) == (3 if pattern == COPY else 1)
        return ptx[: found[which].start()] + ptx[found[which].end() :]

    with gpu("sm_100", mutation=mutate):
        with pytest.raises(EmulationError, match=message):
            known_tensor_memory.check_copied_scales(256, 4)


@pytest.mark.parametrize(("BM", "stages"), [(128, 3), (64, 2)])
def test_two_products_of_one_accumulator_are_wrong_code(BM, stages):
    """Wrong on a B300: https://github.com/triton-lang/triton/issues/10821"""
    with gpu("sm_100"):
        with pytest.raises((EmulationError, AssertionError)):
            known_tensor_memory.check_two_products(BM, stages)


@pytest.mark.parametrize("loop", ["flat", "nested"])
def test_tf32_along_n_is_wrong_code(loop):
    """Triton transposes the operand that TMA has loaded in a buffer of its own, with one stage, and fills the buffer
    for the next product before it waits for the last one, which reads it."""
    message = "RACE in shared memory: write after read: .*not ordered after that of tcgen05.mma"
    with gpu("sm_100"):
        with pytest.raises(EmulationError, match=message):
            known_kernels.check_matmul_tma(torch.float32, (64, 32, 32), 4, 2, False, loop == "flat")
