"""Tile sizes as data: one table per architecture.

`M` rows, `N` output and `K` input features of an M-ragged GEMM; for wgrad `BLOCK_K` is the tile of input features
and `BLOCK_M` the rows taken per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import triton

PASSES = ("fc1_act", "gemm", "dgrad_act", "wgrad")
# How tiles reach a multiprocessor: by descriptors, in warp-specialized kernels; by descriptors; by descriptors
# but for one operand, whose rows are gathered by pointers (no TMA follows an index before Blackwell, and there only the
# warp-specialized kernels ask it to); all by pointers; or by pointers that `alignment` allows no vectors.
Path = Literal["specialised", "tma", "gather", "pointer", "unaligned"]
BY_DESCRIPTORS: tuple[Path, ...] = ("specialised", "tma", "gather")
ShapeClass = Literal["short", "long"]
# Mean rows per expert below which a shape is "short".
SHORT_ROWS = 64


class Tile(NamedTuple):
    """One kernel's launch configuration, also its constexpr `TILE`. Rows of the tables below give the fields in this
    order.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    SUBTILES: int = 1  # column subtiles of the epilogue
    GROUP_M: int = 1  # M-tiles that share a weight tile while it is in L2
    PER_SM: int = 0  # persistent programs on one multiprocessor; 0: one program for each tile


class Key(NamedTuple):
    """Key of a tile in an architecture's table. Where versions of Triton differ, a table is that of the one in use."""

    kernel: str
    path: Path
    bits: int  # of one element of the activations: 16 or 32
    shape: ShapeClass


def _both(short: Tile, long: Tile | None = None) -> dict[ShapeClass, Tile]:
    return {"short": short, "long": long or short}


Rows = dict[tuple[str, Path, int], dict[ShapeClass, Tile]]

# Pointer loads of fp32, and loads that cannot be vectors; sizes that compile everywhere without spilling.
_POINTER: Rows = {
    ("fc1_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 4, 8)),
    ("gemm", "pointer", 32): _both(Tile(64, 64, 32, 4, 3)),
    ("dgrad_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 2, 8)),
    ("wgrad", "pointer", 16): _both(Tile(32, 128, 128, 8, 4, SUBTILES=2, GROUP_M=8, PER_SM=2)),
    ("wgrad", "pointer", 32): _both(Tile(16, 32, 64, 4, 3, SUBTILES=2, GROUP_M=8, PER_SM=4)),
}
# An address for each element that a thread loads: small tiles, for many threads.
_UNALIGNED: Rows = {
    ("fc1_act", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 4, 8)),
    ("gemm", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 4, 8)),
    ("dgrad_act", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 4, 8)),
    ("wgrad", "unaligned", 16): _both(Tile(32, 128, 128, 8, 2, SUBTILES=2, GROUP_M=8, PER_SM=2)),
    ("fc1_act", "unaligned", 32): _both(Tile(32, 32, 16, 4, 2, 2, 8)),
    ("gemm", "unaligned", 32): _both(Tile(32, 32, 16, 4, 2, 2, 8)),
    ("dgrad_act", "unaligned", 32): _both(Tile(32, 32, 16, 4, 2, 2, 8)),
    ("wgrad", "unaligned", 32): _both(Tile(16, 32, 64, 8, 2, SUBTILES=2, GROUP_M=8, PER_SM=2)),
}
_POINTER |= _UNALIGNED
_GFX: Rows = {
    ("dgrad_act", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 2, 8)),
    ("wgrad", "pointer", 16): _both(Tile(64, 128, 64, 4, 2, SUBTILES=2, GROUP_M=8, PER_SM=2)),
    ("wgrad", "pointer", 32): _both(Tile(32, 64, 64, 4, 2, SUBTILES=2, GROUP_M=8, PER_SM=4)),
}

# M-ragged passes by pointers. One program for each tile: two or three share a multiprocessor and cover each other's
# epilogues, and those that find no tile left end at once.
_NVIDIA_RAGGED: Rows = {
    ("fc1_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 2, 8), Tile(128, 64, 64, 8, 3, 2, 8)),
    ("gemm", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 1, 8), Tile(128, 128, 64, 8, 3, 2, 8)),
    ("dgrad_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 2, 8), Tile(128, 64, 64, 8, 3, 2, 8)),
}
_AMD_RAGGED: Rows = {
    ("fc1_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 2, 1, 8), Tile(128, 64, 64, 8, 2, 1, 8)),
    ("gemm", "pointer", 16): _both(Tile(64, 64, 64, 4, 2, 1, 8), Tile(128, 128, 64, 8, 2, 1, 8)),
    ("dgrad_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 2, 2, 8), Tile(128, 64, 64, 8, 2, 2, 8)),
}

# M-ragged passes by descriptors: 128 x 256 accumulators (fc1: of 128 channels each), because at 128 x 128 the operands
# come from L2 at 64 FLOPs a byte, more than it can deliver at full speed. They fill a multiprocessor, so programs are
# persistent: `flatten` in the kernel then loads a tile's first operands under the stores of the one before. Not where
# fc1 gathers rows, whose addresses would be two tiles' at once, more than there are registers.
_SM_90: Rows = {
    ("fc1_act", "tma", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("gemm", "tma", 16): _both(Tile(64, 128, 64, 4, 3, 1, 8, 2), Tile(128, 256, 64, 8, 4, 2, 8, 1)),
    ("dgrad_act", "tma", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("fc1_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8), Tile(128, 128, 32, 8, 6, 8, 8)),
    ("dgrad_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
}
_SM_100: Rows = {
    ("fc1_act", "tma", 16): _both(Tile(64, 64, 64, 4, 4, 4, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("gemm", "tma", 16): _both(Tile(64, 128, 64, 4, 3, 1, 8, 2), Tile(128, 256, 64, 8, 4, 2, 8, 1)),
    ("dgrad_act", "tma", 16): _both(Tile(64, 64, 64, 8, 4, 4, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("fc1_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 4, 8), Tile(128, 128, 64, 8, 4, 4, 8)),
    ("dgrad_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
}

# Few rows per expert leave wgrad bound by main_grad's traffic: two small programs per multiprocessor, of which one adds
# while the other multiplies. Many rows: the largest tile, for the fewest loads of its operands. Triton 3.9 stages a
# subtile beside the operands, which leaves room for a quarter of the tile.
_WGRAD_TMA: Rows = {
    ("wgrad", "tma", 16): _both(
        Tile(64, 128, 128, 4, 3, SUBTILES=4, GROUP_M=8, PER_SM=2),
        Tile(64, 128, 256, 8, 4, SUBTILES=4, GROUP_M=16, PER_SM=1),
    ),
    ("wgrad", "tma", 32): _both(Tile(32, 128, 128, 8, 4, SUBTILES=4, GROUP_M=8, PER_SM=1)),
}
# Loads of indices take some of the stages, addresses take registers: more stages and threads, for as much on its way.
_WGRAD_TMA |= {
    ("wgrad", "gather", 16): _both(
        Tile(64, 128, 128, 8, 4, SUBTILES=4, GROUP_M=8, PER_SM=2),
        Tile(64, 128, 256, 8, 6, SUBTILES=4, GROUP_M=16, PER_SM=1),
    ),
}
_SM_90 |= _WGRAD_TMA
# One warp loads and two warpgroups multiply, each 64 of a tile's rows: `warp_specialized/hopper.py`. For long loads
# alone.
_SM_90 |= {
    ("fc1_act", "specialised", 16): {"long": Tile(128, 128, 64, 4, 3, SUBTILES=2, GROUP_M=8, PER_SM=1)},
    ("gemm", "specialised", 16): {"long": Tile(128, 256, 64, 4, 3, SUBTILES=1, GROUP_M=8, PER_SM=1)},
    ("dgrad_act", "specialised", 16): {"long": Tile(128, 256, 64, 4, 3, SUBTILES=8, GROUP_M=8, PER_SM=1)},
    ("wgrad", "specialised", 16): {"long": Tile(64, 128, 256, 4, 3, SUBTILES=4, GROUP_M=16, PER_SM=1)},
}
_SM_100 |= _WGRAD_TMA
# One warp loads, one multiplies, into sums of two tiles in turn, and these eight write:
# `warp_specialized/blackwell.py`.
_SM_100 |= {
    ("fc1_act", "specialised", 16): {"long": Tile(128, 128, 64, 8, 4, SUBTILES=4, GROUP_M=8, PER_SM=1)},
    ("gemm", "specialised", 16): {"long": Tile(128, 256, 64, 8, 4, SUBTILES=4, GROUP_M=8, PER_SM=1)},
    ("dgrad_act", "specialised", 16): {"long": Tile(128, 256, 64, 8, 3, SUBTILES=8, GROUP_M=8, PER_SM=1)},
    ("wgrad", "specialised", 16): {"long": Tile(64, 128, 256, 8, 3, SUBTILES=4, GROUP_M=16, PER_SM=1)},
}
# Triton 3.7.1 transposes 32-bit operands of tcgen05 through one buffer, which the next step overwrites while the last
# one is still multiplied: by descriptors that is a race, by pointers it is not.
del _SM_100["wgrad", "tma", 32]
_SM_100 |= {
    ("wgrad", "pointer", 16): _both(Tile(64, 128, 128, 8, 3, SUBTILES=4, GROUP_M=8, PER_SM=2)),
    ("wgrad", "pointer", 32): _both(Tile(32, 128, 128, 8, 3, SUBTILES=8, GROUP_M=8, PER_SM=2)),
}

# Where others spill a few bytes, because the compiler prefers those to fewer programs on a multiprocessor.
_SM_100 |= {
    ("fc1_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 2, 8), Tile(128, 64, 64, 8, 3, 4, 8)),
    ("gemm", "pointer", 32): _both(Tile(64, 64, 32, 4, 3, 2)),
    ("dgrad_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 4, 8), Tile(128, 64, 64, 8, 3, 2, 8)),
    ("dgrad_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 4, 8)),
}
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
if TRITON == (3, 8):  # alone spills there with four subtiles
    _SM_100["dgrad_act", "tma", 16]["long"] = Tile(128, 128, 64, 8, 4, 8, 8, 1)
_SM_80: Rows = {
    ("fc1_act", "unaligned", 32): _both(Tile(32, 32, 16, 4, 2, 4, 8)),
    ("wgrad", "pointer", 16): _both(Tile(32, 128, 128, 8, 4, SUBTILES=4, GROUP_M=8, PER_SM=2)),
    ("wgrad", "pointer", 32): _both(Tile(16, 32, 64, 4, 3, SUBTILES=1, GROUP_M=8, PER_SM=4)),
    ("wgrad", "unaligned", 32): _both(Tile(16, 32, 64, 8, 2, SUBTILES=4, GROUP_M=8, PER_SM=2)),
}
_SM_90 |= {
    ("fc1_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 2, 8)),
    ("dgrad_act", "unaligned", 32): _both(Tile(32, 32, 16, 4, 2, 4, 8)),
    ("wgrad", "unaligned", 32): _both(Tile(16, 32, 64, 8, 2, SUBTILES=4, GROUP_M=8, PER_SM=2)),
}
_SM_100 |= {("dgrad_act", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 2, 8))}
_SM_120: Rows = {
    ("dgrad_act", "pointer", 16): _both(Tile(64, 32, 64, 4, 3, 4, 8), Tile(128, 64, 64, 8, 3, 2, 8)),
    ("dgrad_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 8, 8)),
    ("dgrad_act", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 2, 8)),
    ("dgrad_act", "unaligned", 32): _both(Tile(32, 32, 16, 4, 2, 4, 8)),
    ("wgrad", "pointer", 32): _both(Tile(16, 32, 64, 4, 3, SUBTILES=4, GROUP_M=8, PER_SM=4)),
}

TABLES: dict[str, Rows] = {
    "sm_80": _POINTER | _NVIDIA_RAGGED | _SM_80,
    "sm_90": _POINTER | _NVIDIA_RAGGED | _SM_90,
    "sm_100": _POINTER | _NVIDIA_RAGGED | _SM_100,
    "sm_120": _POINTER | _NVIDIA_RAGGED | _SM_120,
    "gfx942": _POINTER | _AMD_RAGGED | _GFX,
    "gfx950": _POINTER | _AMD_RAGGED | _GFX,
    "interpreter": {
        (kernel, path, bits): _both(Tile(16, 32, 32, 1, 1, *((2, 2, 1) if path in BY_DESCRIPTORS else (1, 2, 0))))
        for kernel in PASSES
        for path in get_args(Path)
        if path != "specialised"  # Gluon has no interpreter
        for bits in (16, 32)
    },
}


def shipped(architecture: str) -> Iterator[tuple[Key, Tile]]:
    """Every configuration of one architecture."""
    for (kernel, path, bits), by_shape in TABLES[architecture].items():
        for shape, tile in by_shape.items():
            yield Key(kernel, path, bits, shape), tile


@lru_cache
def row_blocks(architecture: str) -> tuple[int, ...]:
    """Every BLOCK_M that the M-ragged passes' tables have: plans hold a table of tiles for each."""
    return tuple(sorted({tile.BLOCK_M for key, tile in shipped(architecture) if key.kernel != "wgrad"}))


def shape_class(rows_per_expert: float) -> ShapeClass:
    """The class of a load, by its mean."""
    return "short" if rows_per_expert < SHORT_ROWS else "long"
