"""The choice of a launch's tile from an architecture's table, by what tensors and device allow.

Loads are "long" from a mean of `SHORT_ROWS` rows per expert on, padding rows and empty experts among them. Whether the
operands of wgrad fit depends on the tile, so `wgrad/operands.py` goes through `choices` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .table import (
    BY_DESCRIPTORS,
    FLOPS_A_BYTE,
    FORMATS,
    TABLES,
    TRITON,
    Key,
    Path,
    Recipe,
    Regime,
    Tile,
    Tiles,
    shape_class,
)


class Chosen(NamedTuple):
    """A tile, and its key in the table."""

    key: Key
    tile: Tile
    refused: str = ""  # why a warp-specialized kernel, which the target uses, cannot do the launch

    @property
    def path(self) -> Path:
        """How tiles are moved."""
        return self.key.path


@dataclass(frozen=True, eq=False)
class Target:
    """The facts about a device that plans use, and the user's settings."""

    architecture: str
    multiprocessors: int
    tiles: Tiles  # the architecture's table
    # Whether warp-specialized kernels are used wherever the tables have them; None: where a GPU has timed them.
    warp_specialized: bool | None = None
    tf32: bool = False  # whether fp32 products may be computed in TF32
    flops_a_byte: float = FLOPS_A_BYTE["H200"]  # see `flops_a_byte`

    def precision(self, dtype: torch.dtype) -> str:
        """Precision of products of that dtype, as `tl.dot` takes it."""
        return "tf32" if self.tf32 and dtype == torch.float32 else "ieee"

    @property
    def consumers(self) -> int:
        """Partitions that share a tile's rows in warp-specialized kernels: two with accumulators in registers,
        or one with accumulators in tensor memory.
        """
        return 2 if self.architecture == "sm_90" else 1

    @property
    def warp_specializes(self) -> bool:
        """Whether warp-specialized kernels in 16 bits are used: by default on Hopper, where they are faster."""
        return self.architecture == "sm_90" if self.warp_specialized is None else self.warp_specialized

    @property
    def triton_warp_specializes(self) -> bool:
        """Whether Triton itself can divide the loop of a kernel among warps: with tensor memory, since Triton 3.7."""
        return TRITON >= (3, 7) and self.architecture == "sm_100"

    def gathers_by_tma(self, path: Path) -> bool:
        """Whether TMA gathers rows on that path: Blackwell's does, in warp-specialized kernels."""
        return path == "warp_specialized" and self.consumers == 1

    def num_programs(self, tile: Tile, tiles: int) -> int:
        """How many programs to launch for at most that many tiles."""
        return min(tiles, tile.PER_SM * self.multiprocessors) if tile.PER_SM else tiles

    def consumer_rows(self, path: Path, tile: Tile) -> int:
        """How many of a tile's rows TMA moves at once: those of one consumer."""
        return tile.BLOCK_M // self.consumers if path == "warp_specialized" else tile.BLOCK_M


def target(device: torch.device, warp_specialized: bool | None, dtype: torch.dtype) -> Target:
    """Target of launches on tensors of the device and dtype."""
    return _target(device, warp_specialized, allows_tf32(dtype))


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether torch's global setting allows TF32 in products of the dtype, and the GPU is NVIDIA's."""
    # Every way of setting it shows here; `get_float32_matmul_precision` raises where the newer ones were used.
    return dtype == torch.float32 and torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"


@lru_cache
def _target(device: torch.device, warp_specialized: bool | None, tf32: bool) -> Target:
    name = architecture(device)
    if triton.knobs.runtime.interpret:
        few = 3  # so that tests see programs with several tiles
        return Target(name, few, TABLES[name], warp_specialized, tf32)
    card = torch.cuda.get_device_properties(device)
    ratio = flops_a_byte(card.name)
    return Target(name, card.multi_processor_count, TABLES[name], warp_specialized, tf32, ratio)


def flops_a_byte(card: str) -> float:
    """FLOPs of this card for each byte of its memory; a wgrad with fewer is limited by memory. Unknown cards get those
    of an H200.
    """
    return next((ratio for model, ratio in FLOPS_A_BYTE.items() if model in card), FLOPS_A_BYTE["H200"])


@lru_cache
def architecture(device: torch.device) -> str:
    """Name of the table for a device: its own, or that of the newest older GPU of the same vendor."""
    if triton.knobs.runtime.interpret:
        if isinstance(tl.sum, triton.JITFunction):
            raise RuntimeError(
                "TRITON_INTERPRET=1: expected it before Triton is imported; got it afterwards, "
                "when kernels can no longer be interpreted: set it before Python starts"
            )
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


def choices(
    kernel: str,
    dtype: torch.dtype,
    target: Target,
    rows_per_expert: float,
    gathered: bool = False,
    regime: Regime = "any",
) -> Iterator[Chosen]:
    """Tiles for activations of `dtype`, best path first; `gathered`: one operand has rows by an index.

    Path `warp_specialized` is included if the target uses such kernels. A tile of the `regime` goes before one of any.
    """
    paths: tuple[Path, ...] = ("warp_specialized", "gather" if gathered else "tma", "pointer", "unaligned")
    for path in paths:
        key = Key(kernel, path, FORMATS[dtype], shape_class(rows_per_expert))
        if path == "warp_specialized":
            key = key._replace(gathered=gathered, regime=regime)
            if key not in target.tiles:
                key = key._replace(regime="any")
        tile = target.tiles.get(key)
        if tile is not None and (path != "warp_specialized" or target.warp_specializes):
            yield Chosen(key, tile)


def eight_bit(kernel: str, recipe: Recipe, target: Target, missing: str, regime: Regime = "any") -> Chosen:
    """The tile of a GEMM of 8-bit operands, for loads of any length; `missing`: why warp-specialized kernels cannot be
    compiled. A tile of the `regime` goes before one of any.
    """
    paths: tuple[Path, ...] = ("warp_specialized", "pointer")
    every = (Key(kernel, path, recipe, "long", regime=wanted) for path in paths for wanted in (regime, "any"))
    keys = [key for key in every if key in target.tiles]
    if missing and (not keys or keys[0].path == "warp_specialized"):
        raise NotImplementedError(f"recipe={recipe!r}: {missing}")
    if not keys:
        raise NotImplementedError(
            f"recipe={recipe!r}: expected a GPU with kernels for it (fp8_block: sm_90; mxfp8: sm_100, sm_120, gfx950), "
            f'or the CPU with impl="torch"; got {target.architecture}'
        )
    return Chosen(keys[0], target.tiles[keys[0]])


def choose(
    kernel: str,
    dtype: torch.dtype,
    target: Target,
    tma_fits: bool,
    vectors_fit: bool,
    rows_per_expert: float,
    gathered: bool = False,
    refused: str = "",
    regime: Regime = "any",
) -> Chosen:
    """The first of `choices` that tensors and device allow; `refused`: why a warp-specialized kernel cannot do it."""
    allowed = {"warp_specialized": not refused, "pointer": vectors_fit}
    every = [*choices(kernel, dtype, target, rows_per_expert, gathered, regime)]
    best = next(
        chosen for chosen in every if allowed.get(chosen.path, True) and (tma_fits or chosen.path not in BY_DESCRIPTORS)
    )
    return best if every[0].path != "warp_specialized" or best is every[0] else best._replace(refused=refused)
