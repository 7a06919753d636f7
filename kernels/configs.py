"""Tile sizes as data: one table per architecture. `M` rows, `N` output and `K` input features of an M-ragged GEMM;
for wgrad `BLOCK_K` is the tile of input features and `BLOCK_M` the rows taken per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """One kernel's launch configuration."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


_INTERPRETER = {name: Tile(16, 32, 32, 1, 1) for name in ("fc1_act", "gemm", "dgrad_act", "wgrad")}

# Not tuned yet: sizes that compile everywhere without spilling (pointer loads, no bulk copies).
_PORTABLE = {
    "fc1_act": Tile(64, 64, 32, 8, 3),
    "gemm": Tile(64, 64, 32, 4, 3),
    "dgrad_act": Tile(64, 32, 32, 4, 3),
    "wgrad": Tile(32, 64, 32, 4, 3),
}


def select(kernel: str, device: torch.device) -> Tile:
    """The configuration of `kernel` on `device`."""
    if triton.knobs.runtime.interpret:
        return _INTERPRETER[kernel]
    return _PORTABLE[kernel]


def dot_precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: exactly, unless torch's global setting allows TF32 and the GPU is NVIDIA's."""
    if dtype == torch.float32 and torch.version.hip is None and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"
