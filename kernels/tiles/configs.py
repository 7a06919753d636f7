"""Tile sizes as data: one table per architecture.

`M` rows, `N` output and `K` input features of an M-ragged GEMM; for wgrad `BLOCK_K` is the tile of input features
and `BLOCK_M` the rows taken per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
import triton

# How tiles reach a multiprocessor: by descriptors, in kernels with a task for each warp; by descriptors; by descriptors
# but for one operand, whose rows are gathered by pointers (no TMA follows an index before Blackwell, and there only the
# kernels with tasks ask it to); all by pointers; or by pointers that `alignment` allows no vectors.
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
    """What a tile is chosen by, besides the architecture."""

    kernel: str
    path: Path
    bits: int  # of one element of the activations: 16 or 32
    shape: ShapeClass


def _both(short: Tile, long: Tile | None = None) -> dict[ShapeClass, Tile]:
    return {"short": short, "long": long or short}


_Rows = dict[tuple[str, Path, int], dict[ShapeClass, Tile]]

# Pointer loads of fp32, and loads that cannot be vectors; sizes that compile everywhere without spilling.
_POINTER: _Rows = {
    ("fc1_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 4, 8)),
    ("gemm", "pointer", 32): _both(Tile(64, 64, 32, 4, 3)),
    ("dgrad_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 2, 8)),
    ("wgrad", "pointer", 16): _both(Tile(32, 128, 128, 8, 4, SUBTILES=2, GROUP_M=8, PER_SM=2)),
    ("wgrad", "pointer", 32): _both(Tile(16, 32, 64, 4, 3, SUBTILES=2, GROUP_M=8, PER_SM=4)),
}
# An address for each element that a thread loads: small tiles, for many threads.
_UNALIGNED: _Rows = {
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
_GFX: _Rows = {
    ("dgrad_act", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 2, 8)),
    ("wgrad", "pointer", 16): _both(Tile(64, 128, 64, 4, 2, SUBTILES=2, GROUP_M=8, PER_SM=2)),
    ("wgrad", "pointer", 32): _both(Tile(32, 64, 64, 4, 2, SUBTILES=2, GROUP_M=8, PER_SM=4)),
}

# M-ragged passes by pointers. One program for each tile: two or three share a multiprocessor and cover each other's
# epilogues, and those that find no tile left end at once.
_NVIDIA_RAGGED: _Rows = {
    ("fc1_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 2, 8), Tile(128, 64, 64, 8, 3, 2, 8)),
    ("gemm", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 1, 8), Tile(128, 128, 64, 8, 3, 2, 8)),
    ("dgrad_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 3, 2, 8), Tile(128, 64, 64, 8, 3, 2, 8)),
}
_AMD_RAGGED: _Rows = {
    ("fc1_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 2, 1, 8), Tile(128, 64, 64, 8, 2, 1, 8)),
    ("gemm", "pointer", 16): _both(Tile(64, 64, 64, 4, 2, 1, 8), Tile(128, 128, 64, 8, 2, 1, 8)),
    ("dgrad_act", "pointer", 16): _both(Tile(64, 64, 64, 4, 2, 2, 8), Tile(128, 64, 64, 8, 2, 2, 8)),
}

# M-ragged passes by descriptors: 128 x 256 accumulators (fc1: of 128 channels each), because at 128 x 128 the operands
# come from L2 at 64 FLOPs a byte, more than it can deliver at full speed. They fill a multiprocessor, so programs are
# persistent: `flatten` in the kernel then loads a tile's first operands under the stores of the one before. Not where
# fc1 gathers rows, whose addresses would be two tiles' at once, more than there are registers.
_SM_90: _Rows = {
    ("fc1_act", "tma", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("gemm", "tma", 16): _both(Tile(64, 128, 64, 4, 3, 1, 8, 2), Tile(128, 256, 64, 8, 4, 2, 8, 1)),
    ("dgrad_act", "tma", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("fc1_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8), Tile(128, 128, 32, 8, 6, 8, 8)),
    ("dgrad_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
}
_SM_100: _Rows = {
    ("fc1_act", "tma", 16): _both(Tile(64, 64, 64, 4, 4, 4, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("gemm", "tma", 16): _both(Tile(64, 128, 64, 4, 3, 1, 8, 2), Tile(128, 256, 64, 8, 4, 2, 8, 1)),
    ("dgrad_act", "tma", 16): _both(Tile(64, 64, 64, 8, 4, 4, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
    ("fc1_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 4, 8), Tile(128, 128, 64, 8, 4, 4, 8)),
    ("dgrad_act", "gather", 16): _both(Tile(64, 64, 64, 4, 4, 2, 8, 2), Tile(128, 128, 64, 8, 4, 4, 8, 1)),
}

# Few rows per expert leave wgrad bound by main_grad's traffic: two small programs per multiprocessor, of which one adds
# while the other multiplies. Many rows: the largest tile, for the fewest loads of its operands. Triton 3.9 stages a
# subtile beside the operands, which leaves room for a quarter of the tile.
_WGRAD_TMA: _Rows = {
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
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
if _TRITON == (3, 8):  # alone spills there with four subtiles
    _SM_100["dgrad_act", "tma", 16]["long"] = Tile(128, 128, 64, 8, 4, 8, 8, 1)
_SM_80: _Rows = {
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
_SM_120: _Rows = {
    ("dgrad_act", "pointer", 16): _both(Tile(64, 32, 64, 4, 3, 4, 8), Tile(128, 64, 64, 8, 3, 2, 8)),
    ("dgrad_act", "pointer", 32): _both(Tile(64, 32, 32, 4, 3, 8, 8)),
    ("dgrad_act", "unaligned", 16): _both(Tile(64, 64, 32, 8, 2, 2, 8)),
    ("dgrad_act", "unaligned", 32): _both(Tile(32, 32, 16, 4, 2, 4, 8)),
    ("wgrad", "pointer", 32): _both(Tile(16, 32, 64, 4, 3, SUBTILES=4, GROUP_M=8, PER_SM=4)),
}

TABLES: dict[str, _Rows] = {
    "sm_80": _POINTER | _NVIDIA_RAGGED | _SM_80,
    "sm_90": _POINTER | _NVIDIA_RAGGED | _SM_90,
    "sm_100": _POINTER | _NVIDIA_RAGGED | _SM_100,
    "sm_120": _POINTER | _NVIDIA_RAGGED | _SM_120,
    "gfx942": _POINTER | _AMD_RAGGED | _GFX,
    "gfx950": _POINTER | _AMD_RAGGED | _GFX,
    "interpreter": {
        (kernel, path, bits): _both(Tile(16, 32, 32, 1, 1, *((2, 2, 1) if path in BY_DESCRIPTORS else (1, 2, 0))))
        for kernel in ("fc1_act", "gemm", "dgrad_act", "wgrad")
        for path in get_args(Path)
        if path != "specialised"  # Gluon has no interpreter
        for bits in (16, 32)
    },
}


# Whether kernels with a task for each warp are used wherever the tables have them, unless a switch says otherwise.
# This is the default until a GPU has timed them.
SPECIALISED = False
# Tiles tuned on this machine, which go before the tables.
TUNED: dict[Key, Tile] = {}


def shipped(architecture: str) -> Iterator[tuple[Key, Tile]]:
    """Every configuration of one architecture."""
    for (kernel, path, bits), by_shape in TABLES[architecture].items():
        for shape, tile in by_shape.items():
            yield Key(kernel, path, bits, shape), tile


@lru_cache
def architecture(device: torch.device) -> str:
    """The table that serves a device: its own, or that of the newest older GPU of its kind."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return name if name in TABLES else "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    served = [int(name.removeprefix("sm_")) for name in TABLES if name.startswith("sm_")]
    older = [capability for capability in served if capability <= 10 * major + minor]
    if not older:
        raise RuntimeError(f"device: expected compute capability 8.0 or newer; got {major}.{minor} ({device})")
    return f"sm_{max(older)}"


@lru_cache
def row_blocks(device: torch.device) -> tuple[int, ...]:
    """Every BLOCK_M that the M-ragged passes may choose."""
    tiles = [*shipped(architecture(device)), *TUNED.items()]
    return tuple(sorted({tile.BLOCK_M for key, tile in tiles if key.kernel != "wgrad"}))


def has_path(kernel: str, dtype: torch.dtype, device: torch.device, path: Path) -> bool:
    """Whether the device's table has a configuration with that way of moving tiles."""
    return (kernel, path, 8 * dtype.itemsize) in TABLES[architecture(device)]


def shape_class(rows_per_expert: float) -> ShapeClass:
    """The class of a load, by its mean."""
    return "short" if rows_per_expert < SHORT_ROWS else "long"


def select(kernel: str, dtype: torch.dtype, device: torch.device, path: Path, rows_per_expert: float) -> Tile:
    """The configuration of `kernel` for activations of `dtype`."""
    bits, shape = 8 * dtype.itemsize, shape_class(rows_per_expert)
    tuned = TUNED.get(Key(kernel, path, bits, shape)) if TUNED else None
    return tuned or TABLES[architecture(device)][kernel, path, bits][shape]


@lru_cache
def gluon_missing() -> str:
    """What kernels with a task for each warp miss in this Triton; empty if nothing."""
    try:
        from ..warp_specialized import gluon_compat  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} has no Gluon that fits: {error}"
    return ""


def specialised(
    kernel: str, dtype: torch.dtype, device: torch.device, rows_per_expert: float, gathered: bool = False
) -> Tile | None:
    """The configuration of the kernel with a task for each warp; None if there is none, or it is not to be used."""
    if not (SPECIALISED or TUNED):  # without the cost of a key
        return None
    key = Key(kernel, "specialised", 8 * dtype.itemsize, shape_class(rows_per_expert))
    tuned = None if gathered else TUNED.get(key)  # with rows in order
    if not (SPECIALISED or tuned) or (gathered and consumers(device) == 2):  # before Blackwell TMA follows no index
        return None
    table = TABLES[architecture(device)]
    if key[:3] not in table or gluon_missing():
        return None
    return tuned or table[key[:3]].get(key.shape)


def consumers(device: torch.device) -> int:
    """How many tasks share a tile's rows in kernels with a task for each warp: two that multiply, each in registers of
    its own, or one, which finds its sums in tensor memory.
    """
    return 2 if architecture(device) == "sm_90" else 1


def task_rows(path: Path, tile: Tile, device: torch.device) -> int:
    """How many of a tile's rows TMA moves at once: those of one task."""
    return tile.BLOCK_M // consumers(device) if path == "specialised" else tile.BLOCK_M


def choose(
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
    tma_fits: bool,
    vectors_fit: Callable[[], bool],
    rows_per_expert: float,
    gathered: bool = False,
    by_tasks: bool = True,
) -> tuple[Path, Tile]:
    """`select` with the best path that tensors and device allow; `gathered`: rows of one operand by an index;
    `by_tasks`: whether the kernel with a task for each warp can do it.
    """
    if tma_fits and by_tasks and (tile := specialised(kernel, dtype, device, rows_per_expert, gathered)):
        return "specialised", tile
    path: Path = "gather" if gathered else "tma"
    if not (tma_fits and has_path(kernel, dtype, device, path)):
        path = "pointer" if vectors_fit() else "unaligned"
    return path, select(kernel, dtype, device, path, rows_per_expert)


def warp_specializes(device: torch.device) -> bool:
    """Whether Triton gives warps tasks of their own there, as it can with tensor memory from 3.7 on."""
    return _TRITON >= (3, 7) and architecture(device) == "sm_100"


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if triton.knobs.runtime.interpret:
        return 3  # few, so that tests see programs with several tiles
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def cdiv(size: int, block: int) -> int:
    """How many blocks hold `size`; Triton's own asks on every call whether it is compiled."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The next one, of a size of at least 1."""
    return 1 << (size - 1).bit_length()


def num_programs(tile: Tile, device: torch.device, tiles: int) -> int:
    """How many programs to launch for at most that many tiles."""
    return min(tiles, tile.PER_SM * _multiprocessors(device)) if tile.PER_SM else tiles


def dot_precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: exactly, unless torch's global setting allows TF32 and the GPU is NVIDIA's."""
    # Every way of setting it shows here; `get_float32_matmul_precision` raises where the newer ones were used.
    if dtype == torch.float32 and torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"
