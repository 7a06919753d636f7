"""Kernels of known loops: `python loop_kernels.py TARGET NAME...` compiles them for that GPU and prints what the proof
reads of each, a JSON list of costs or of the text that refuses them.
"""

import json
import sys

import torch
import triton
import triton.language as tl

from bench.proof import main_loop
from bench.proof.compiling import compiled, compiling_for
from fusedmlp.doctor.targets import TARGETS
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.warp_specialized.gluon_compat import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    gl,
    gluon,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

BLOCK = tl.constexpr(64)


@triton.jit
def step(a_ptr, b_ptr, k, acc):
    i = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i[:, None] * 512 + k + i[None, :])
    return tl.dot(a, tl.load(b_ptr + (k + i)[:, None] * BLOCK + i[None, :]), acc)


@triton.jit
def one_tile(a_ptr, b_ptr, c_ptr, K, UNROLL: tl.constexpr):
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK, loop_unroll_factor=UNROLL):
        acc = step(a_ptr, b_ptr, k, acc)
    i = tl.arange(0, BLOCK)
    tl.store(c_ptr + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def known_steps(a_ptr, b_ptr, c_ptr, STEPS: tl.constexpr, STATIC: tl.constexpr):
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    if STATIC:
        for k in tl.static_range(STEPS):
            acc = step(a_ptr, b_ptr, k * BLOCK, acc)
    else:
        for k in range(STEPS):
            acc = step(a_ptr, b_ptr, k * BLOCK, acc)
    i = tl.arange(0, BLOCK)
    tl.store(c_ptr + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def short_steps(a_ptr, b_ptr, c_ptr, STEPS: tl.constexpr):
    """So short that LLVM unrolls some steps if it is told to try."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, 16)
    a = tl.load(a_ptr + i[:, None] * 16 + j[None, :])
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(STEPS):
        acc = tl.dot(a, tl.load(b_ptr + (16 * k + j)[:, None] * BLOCK + i[None, :]), acc)
    tl.store(c_ptr + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def tiles(a_ptr, b_ptr, c_ptr, num_tiles, STEPS: tl.constexpr, STATIC: tl.constexpr):
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        known_steps(a_ptr, b_ptr, c_ptr + tile * BLOCK * BLOCK, STEPS, STATIC)


@gluon.jit
def wgmma(a_ptr, b_ptr, c_ptr, steps, WAIT_FIRST: gl.constexpr):
    """Products of buffers that nothing fills, as the loads do not matter here."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    operands = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], shared)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    acc = warpgroup_mma_init(gl.zeros((64, 64), gl.float32, layout))
    for i in range(steps):
        mbarrier.wait(ready.index(i % 2), i // 2 & 1)
        if WAIT_FIRST:
            acc = warpgroup_mma_wait(0, deps=[acc])
        acc = warpgroup_mma(operands.index(i % 2), operands.index(2 + i % 2), acc, is_async=True)
        if not WAIT_FIRST:
            acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
        mbarrier.arrive(ready.index((i + 1) % 2), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(c_ptr + rows[:, None] * 64 + columns[None, :], acc)


@gluon.jit
def tcgen05(a_ptr, b_ptr, c_ptr, steps, WAIT_FIRST: gl.constexpr):
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    operands = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], shared)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(done, count=1)
    acc = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    for i in range(steps):
        mbarrier.wait(ready.index(i % 2), i // 2 & 1)
        if WAIT_FIRST:
            mbarrier.wait(done, i & 1 ^ 1)
        tcgen05_mma(operands.index(i % 2), operands.index(2 + i % 2).permute((1, 0)), acc, use_acc=i > 0)
        tcgen05_commit(done)
        if not WAIT_FIRST:
            mbarrier.wait(done, i & 1)
        mbarrier.arrive(ready.index((i + 1) % 2), count=1)
    mbarrier.wait(done, steps & 1)
    layout: gl.constexpr = gl.BlockedLayout([1, 128], [32, 1], [4, 1], [0, 1])
    rows = gl.arange(0, 128, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 128, gl.SliceLayout(0, layout))
    gl.store(c_ptr + rows[:, None] * 128 + columns[None, :], acc.load(layout))


KERNELS = {
    "loop": (one_tile, {"K": 512, "UNROLL": 1}),
    "unrolled by LLVM": (short_steps, {"STEPS": 64}),
    "unrolled by Triton": (one_tile, {"K": 512, "UNROLL": 2}),
    "unrolled completely": (known_steps, {"STEPS": 4, "STATIC": False}),
    "static": (known_steps, {"STEPS": 4, "STATIC": True}),
    "tiles, unrolled completely": (tiles, {"num_tiles": 7, "STEPS": 4, "STATIC": False}),
    "tiles, static": (tiles, {"num_tiles": 7, "STEPS": 4, "STATIC": True}),
    "wgmma, wait and issue": (wgmma, {"steps": 7, "WAIT_FIRST": True}),
    "wgmma, issue and wait": (wgmma, {"steps": 7, "WAIT_FIRST": False}),
    "tcgen05, wait and issue": (tcgen05, {"steps": 7, "WAIT_FIRST": True}),
    "tcgen05, issue and wait": (tcgen05, {"steps": 7, "WAIT_FIRST": False}),
}


def kernel_of(name, target):
    """Triton's `CompiledKernel` for a target."""
    kernel, arguments = KERNELS[name]
    dtypes = {"a_ptr": torch.bfloat16, "b_ptr": torch.bfloat16, "c_ptr": torch.float32}
    arrays = {name: Array((128, 512), (512, 1), dtype, 0, 0) for name, dtype in dtypes.items()}
    with compiling_for(TARGETS[target]):
        made = compiled(Launch(kernel, (1,), arrays | arguments, {"num_warps": 4, "num_stages": 3}, None)).kernel
    if isinstance(made, Exception):
        raise made
    return made


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    found = main_loop.of([kernel_of(name, target) for name in names])
    print(json.dumps([each._asdict() if isinstance(each, main_loop.MainLoop) else str(each) for each in found]))
