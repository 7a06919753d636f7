"""The GPUs that kernels are proven for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from fusedmlp.kernels.tiles import select, table

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Target:
    """One architecture and the most shared memory (LDS on AMD) that one of its blocks can have, in bytes.

    Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (163, 227, 227 and 99 KiB;
    the reserved 1 KiB a block is already off); AMD CDNA 3 and CDNA 4 ISA guides (64 and 160 KiB).
    """

    name: str
    shared_bytes: int

    @property
    def is_amd(self) -> bool:
        """Whether HIP serves it."""
        return self.name.startswith("gfx")

    @property
    def has_tma(self) -> bool:
        """Whether tiles can be moved by descriptors."""
        return not self.is_amd and self.capability >= 90

    @property
    def capability(self) -> int:
        """NVIDIA's compute capability, times ten."""
        return int(self.name.removeprefix("sm_"))

    def planned_for(
        self,
        shape: table.ShapeClass | None = None,
        with_tma: bool = True,
        specialised: bool = False,
        tf32: bool = False,
    ) -> select.Target:
        """Target of plans, with the tiles of `shape`, whatever the sizes of the tensors.

        Without `with_tma` there is no configuration that uses descriptors, as if weights lay in no one buffer.
        `specialised`: warp-specialized kernels are used where the table has them.
        """
        tiles = tiles_of(table.TABLES[self.name], shape, with_tma)
        # How many programs a launch has changes nothing in a kernel.
        return select.Target(self.name, 100, tiles, select.Settings(specialised), tf32)

    @property
    def triton(self) -> GPUTarget:
        """What Triton calls it."""
        from triton.backends.compiler import GPUTarget  # not above: the command line lists targets without Triton too

        return GPUTarget("hip", self.name, 64) if self.is_amd else GPUTarget("cuda", self.capability, 32)


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 163 * 1024),
        Target("sm_90", 227 * 1024),
        Target("sm_100", 227 * 1024),
        Target("sm_120", 99 * 1024),
        Target("gfx942", 64 * 1024),
        Target("gfx950", 160 * 1024),
    )
}


def tiles_of(tiles: table.Tiles, shape: table.ShapeClass | None, with_tma: bool = True) -> table.Tiles:
    """The tiles of one class of loads, for every load, or all; without `with_tma`, only tiles by pointers."""
    kept = {key: tile for key, tile in tiles.items() if with_tma or key.path not in table.BY_DESCRIPTORS}
    if shape is None:
        return kept
    every = get_args(table.ShapeClass)
    return {key._replace(shape=own): tile for key, tile in kept.items() if key.shape == shape for own in every}
