"""Kernels that are right on GPUs are right on the emulator, in every order."""

import pytest
import torch
from ptx_emulator import known_kernels
from ptx_emulator.driver import gpu
from ptx_emulator.ptx import ORDERS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TARGETS = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


one_by_one = pytest.mark.parametrize("order", ORDERS, ids=[order.completion for order in ORDERS])


def cells(grid, quick):
    """Parameters of (target, ...) whose ids are their values; all but those of `quick` are not part of quick runs."""
    names = ["-".join(str(value).replace(", ", "x").strip("()") for value in cell) for cell in grid]
    assert set(quick) <= set(names)
    return [
        pytest.param(*cell, id=name, marks=[] if name in quick else [pytest.mark.exhaustive])
        for cell, name in zip(grid, names, strict=True)
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_add(target):
    with gpu(target):
        known_kernels.check_add()


@pytest.mark.parametrize(
    ("target", "n", "warps"),
    cells([(t, *size) for t in TARGETS for size in ((781, 4), (100, 1), (2000, 8))], {"sm_90-781-4"}),
)
def test_softmax(target, n, warps):
    with gpu(target):
        known_kernels.check_softmax(n, warps)


BY_POINTERS = [
    (target, dtype, layouts, blocks, warps, stages)
    for target in TARGETS
    for dtype in DTYPES
    for layouts in ("rr", "rc", "cr", "cc")
    for blocks, warps, stages in (
        ((64, 64, 32), 4, 3),
        ((128, 64, 64), 8, 2),
        ((16, 32, 32), 2, 3),
        ((64, 128, 64), 4, 3),
    )
]


@pytest.mark.parametrize(
    ("target", "dtype", "layouts", "blocks", "warps", "stages"),
    cells(
        BY_POINTERS,
        {
            *("sm_80-bf16-rc-64x64x32-4-3", "sm_80-fp32-cr-16x32x32-2-3"),
            *("sm_90-fp16-cc-64x64x32-4-3", "sm_100-bf16-cr-64x128x64-4-3", "sm_100-fp32-rc-64x64x32-4-3"),
        },
    ),
)
def test_matmul_by_pointers(target, dtype, layouts, blocks, warps, stages):
    with gpu(target):
        known_kernels.check_matmul(DTYPES[dtype], layouts, blocks, warps, stages)


@pytest.mark.parametrize("target", TARGETS)
def test_matmul_of_fp32_without_tf32(target):
    with gpu(target):
        known_kernels.check_matmul(torch.float32, "rc", (32, 32, 16), 4, 2, "ieee")


TILES = (
    *(((64, 64, 64), 4, 3), ((128, 128, 64), 8, 3), ((128, 256, 64), 8, 3)),
    *(((64, 32, 32), 4, 2), ((64, 16, 16), 4, 2), ((128, 64, 128), 8, 2)),
)
BY_DESCRIPTORS = [
    (target, dtype, blocks, warps, stages, operand, loop)
    for target in ("sm_90", "sm_100")
    for dtype in DTYPES
    for blocks, warps, stages in TILES
    if dtype != "fp32" or blocks[1] * blocks[2] <= 4096  # more does not fit into shared memory
    for operand in ("nk", "kn")
    if (target, dtype, operand) != ("sm_100", "fp32", "kn")  # test_tf32_along_n_is_wrong_code
    for loop in ("flat", "nested")
]


@pytest.mark.parametrize(
    ("target", "dtype", "blocks", "warps", "stages", "operand", "loop"),
    cells(
        BY_DESCRIPTORS,
        {
            *("sm_90-bf16-64x64x64-4-3-nk-flat", "sm_90-fp16-64x32x32-4-2-kn-nested"),
            *("sm_90-fp32-64x16x16-4-2-nk-nested", "sm_100-bf16-128x128x64-8-3-kn-flat"),
        },
    ),
)
def test_matmul_by_descriptors(target, dtype, blocks, warps, stages, operand, loop):
    with gpu(target):
        known_kernels.check_matmul_tma(DTYPES[dtype], blocks, warps, stages, operand == "nk", loop == "flat")


QUARTERS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize(
    ("target", "dtype", "layouts", "blocks", "warps"),
    cells(
        [
            (target, dtype, layouts, blocks, warps)
            for target in TARGETS[1:]
            for dtype in QUARTERS
            for layouts in ("rr", "rc", "cr", "cc")
            for blocks, warps in (((64, 64, 32), 4), ((128, 64, 64), 8), ((16, 32, 32), 2), ((64, 128, 128), 4))
        ],
        {"sm_90-e4m3-rc-64x64x32-4", "sm_90-e5m2-cr-16x32x32-2", "sm_100-e5m2-cr-64x128x128-4"},
    ),
)
def test_matmul_of_bytes_by_pointers(target, dtype, layouts, blocks, warps):
    with gpu(target):
        known_kernels.check_matmul(QUARTERS[dtype], layouts, blocks, warps, 3)


@pytest.mark.parametrize(
    ("target", "dtype", "blocks", "warps", "operand"),
    cells(
        [
            (target, dtype, blocks, warps, operand)
            for target in TARGETS[1:]
            for dtype in QUARTERS
            for blocks, warps in (((64, 64, 64), 4), ((128, 128, 128), 8), ((64, 32, 32), 4))
            for operand in ("nk", "kn")
        ],
        {"sm_90-e4m3-128x128x128-8-nk", "sm_100-e4m3-64x32x32-4-kn"},
    ),
)
def test_matmul_of_bytes_by_descriptors(target, dtype, blocks, warps, operand):
    with gpu(target):
        known_kernels.check_matmul_tma(QUARTERS[dtype], blocks, warps, 3, operand == "nk", True)


@one_by_one
@pytest.mark.parametrize(("target", "warps"), cells([(t, w) for t in TARGETS for w in (1, 4)], {"sm_90-4"}))
def test_split_k(target, warps, order):
    """Sums come in another order in each."""
    with gpu(target, orders=[order]):
        known_kernels.check_split_k(warps)


@pytest.mark.parametrize(
    ("target", "block", "warps"),
    cells([(t, *size) for t in TARGETS for size in ((256, 4), (512, 8), (128, 1))], {"sm_80-256-4"}),
)
def test_histogram_scan_gather_and_sort(target, block, warps):
    with gpu(target):
        known_kernels.check_permutations(block, warps)


@pytest.mark.parametrize("target", TARGETS)
def test_atomics(target):
    with gpu(target):
        known_kernels.check_atomics()


@one_by_one
@pytest.mark.parametrize("target", TARGETS)
def test_tickets(target, order):
    """Programs come in another order in each."""
    with gpu(target, orders=[order]):
        known_kernels.check_tickets()


@pytest.mark.parametrize("target", TARGETS[1:])
def test_tma_reductions(target):
    with gpu(target):
        known_kernels.check_reduce_tma()


@pytest.mark.parametrize("target", TARGETS[1:])
def test_descriptors_made_by_the_kernel(target):
    with gpu(target):
        known_kernels.check_device_descriptors()
