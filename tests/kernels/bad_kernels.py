"""Kernels that are unfit to ship, each in its own way: `python bad_kernels.py NAME TARGET` prints the proof's rows."""

import json
import sys

import torch
import triton
import triton.language as tl

from bench.proof import proof
from bench.proof.compiling import compiled, compiling_for
from fusedmlp.kernels.launching.program import Launch
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.tiles.select import Chosen
from fusedmlp.kernels.tiles.table import Key, Tile
from fusedmlp.targets import TARGETS


@triton.jit
def _grouped_good_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + i[:, None] * K + k + i[None, :])
        b = tl.load(b_ptr + (k + i)[:, None] * BLOCK + i[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def _grouped_without_dot_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(K):
        acc += tl.load(a_ptr + i * K + k).to(tl.float32)[:, None] * tl.load(b_ptr + k * BLOCK + i)[None, :]
    tl.store(c_ptr + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def _adding_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(c_ptr + i, tl.load(a_ptr + tl.program_id(0) * K + i).to(tl.float32))


@triton.jit
def _grouped_not_compiling_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 3)


BAD = {
    "good": (_grouped_good_kernel, 64, {"num_warps": 4, "num_stages": 2}),
    "without_tma": (_grouped_good_kernel, 64, {"num_warps": 4, "num_stages": 2}),
    "serialized": (_grouped_good_kernel, 128, {"num_warps": 4, "num_stages": 2, "maxnreg": 96}),
    "spilling": (_grouped_good_kernel, 128, {"num_warps": 1, "num_stages": 1}),
    "too_much_shared": (_grouped_good_kernel, 128, {"num_warps": 8, "num_stages": 6}),
    "without_dot": (_grouped_without_dot_kernel, 32, {"num_warps": 4}),
    "adding": (_adding_kernel, 64, {"num_warps": 4}),
    "not_compiling": (_grouped_not_compiling_kernel, 32, {}),
}

if __name__ == "__main__":
    name, target = sys.argv[1:]
    kernel, block, options = BAD[name]
    bf16, fp32 = (Array((block, 512), (512, 1), dtype, 0, 0) for dtype in (torch.bfloat16, torch.float32))
    # "without_tma": a kernel that uses pointers, though its tile is of the path with descriptors.
    key = Key("gemm", "tma" if name == "without_tma" else "pointer", 16, "long")
    arguments = {"a_ptr": bf16, "b_ptr": bf16, "c_ptr": fp32, "K": 512, "BLOCK": block}
    launch = Launch(kernel, (1,), arguments, options, Chosen(key, Tile(block, block, block, 4, 2)))
    with compiling_for(TARGETS[target]):
        made = compiled(launch)
    rows = proof.judge([(made, name)], proof.Task(target, "bf16"))
    print(json.dumps([row.as_json() | {"problems": row.problems} for row in rows]))
