"""The choice of a launch's tile from an architecture's table, or the tuner's, by what tensors and device allow.

Loads are "long" from a mean of `SHORT_ROWS` rows per expert on, padding rows and empty experts among them. wgrad's
operands go each their own way, so that `wgrad/operands.py` chooses among its paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from .table import TABLES, TRITON, Key, Path, Rows, Tile, shape_class


class Chosen(NamedTuple):
    """A tile, and what it was chosen by."""

    key: Key
    tile: Tile

    @property
    def path(self) -> Path:
        """How tiles are moved."""
        return self.key.path


@dataclass(frozen=True, eq=False)
class Settings:
    """Choices of a user. Each object is a value of its own: two are never equal."""

    # Whether warp-specialized kernels are used wherever the tables have them. Not by default until a GPU has
    # timed them.
    specialised: bool = False
    tuned: Mapping[Key, Tile] = field(default_factory=dict)  # go before the tables


DEFAULT = Settings()


@dataclass(frozen=True, eq=False)
class Target:
    """Device, as far as a plan asks, and settings, for which launches are planned."""

    architecture: str
    multiprocessors: int
    rows: Rows  # the architecture's table
    settings: Settings = DEFAULT
    tf32: bool = False  # whether fp32 products may be computed in TF32

    def precision(self, dtype: torch.dtype) -> str:
        """Precision of products of that dtype, as `tl.dot` takes it."""
        return "tf32" if self.tf32 and dtype == torch.float32 else "ieee"

    @property
    def consumers(self) -> int:
        """How many partitions share a tile's rows in warp-specialized kernels: two that multiply, each in registers
        of its own, or one, which finds its sums in tensor memory.
        """
        return 2 if self.architecture == "sm_90" else 1

    @property
    def warp_specializes(self) -> bool:
        """Whether Triton specializes warps there, as it can with tensor memory from 3.7 on."""
        return TRITON >= (3, 7) and self.architecture == "sm_100"

    def num_programs(self, tile: Tile, tiles: int) -> int:
        """How many programs to launch for at most that many tiles."""
        return min(tiles, tile.PER_SM * self.multiprocessors) if tile.PER_SM else tiles

    def consumer_rows(self, path: Path, tile: Tile) -> int:
        """How many of a tile's rows TMA moves at once: those of one consumer."""
        return tile.BLOCK_M // self.consumers if path == "specialised" else tile.BLOCK_M


def target(device: torch.device, settings: Settings, dtype: torch.dtype) -> Target:
    """Target of launches on tensors of the device and dtype."""
    return _target(device, settings, allows_tf32(dtype))


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether torch's global setting allows TF32 in products of the dtype, and the GPU is NVIDIA's."""
    # Every way of setting it shows here; `get_float32_matmul_precision` raises where the newer ones were used.
    return dtype == torch.float32 and torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"


@lru_cache
def _target(device: torch.device, settings: Settings, tf32: bool) -> Target:
    name = architecture(device)
    if triton.knobs.runtime.interpret:
        multiprocessors = 3  # few, so that tests see programs with several tiles
    else:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Target(name, multiprocessors, TABLES[name], settings, tf32)


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


def tile_for(kernel: str, dtype: torch.dtype, target: Target, path: Path, rows_per_expert: float) -> Chosen:
    """The configuration of `kernel` for activations of `dtype`."""
    key = Key(kernel, path, 8 * dtype.itemsize, shape_class(rows_per_expert))
    return Chosen(key, target.settings.tuned.get(key) or target.rows[key[:3]][key.shape])


def has_path(kernel: str, dtype: torch.dtype, target: Target, path: Path) -> bool:
    """Whether the device's table has a configuration with that way of moving tiles."""
    return (kernel, path, 8 * dtype.itemsize) in target.rows


def specialised(
    kernel: str, dtype: torch.dtype, target: Target, rows_per_expert: float, gathered: bool = False
) -> Chosen | None:
    """The configuration of the warp-specialized kernel; None if there is none, or it is not to be used."""
    key = Key(kernel, "specialised", 8 * dtype.itemsize, shape_class(rows_per_expert))
    tuned = None if gathered else target.settings.tuned.get(key)  # with rows in order
    if not (target.settings.specialised or tuned):
        return None
    if (gathered and target.consumers == 2) or key[:3] not in target.rows:  # before Blackwell TMA follows no index
        return None
    tile = tuned or target.rows[key[:3]].get(key.shape)
    return Chosen(key, tile) if tile else None


def choose(
    kernel: str,
    dtype: torch.dtype,
    target: Target,
    tma_fits: bool,
    vectors_fit: bool,
    rows_per_expert: float,
    gathered: bool = False,
    warp_specialized: bool = True,
) -> Chosen:
    """`tile_for` with the best path that tensors and device allow; `gathered`: rows of one operand by an index;
    `warp_specialized`: whether the warp-specialized kernel can do it.
    """
    if tma_fits and warp_specialized and (found := specialised(kernel, dtype, target, rows_per_expert, gathered)):
        return found
    path: Path = "gather" if gathered else "tma"
    if not (tma_fits and has_path(kernel, dtype, target, path)):
        path = "pointer" if vectors_fit else "unaligned"
    return tile_for(kernel, dtype, target, path, rows_per_expert)
