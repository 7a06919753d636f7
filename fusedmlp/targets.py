"""GPU architectures for which kernels are compiled and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

if TYPE_CHECKING:  # modules that need Triton; the command line lists targets without it, too
    from triton.backends.compiler import GPUTarget

    from fusedmlp.kernels.tiles import select, table


class Target(NamedTuple):
    """One architecture and the most shared memory (LDS on AMD) that one of its blocks can have, in bytes."""

    name: str
    shared_bytes: int

    @property
    def is_amd(self) -> bool:
        """Whether it is an AMD GPU (HIP)."""
        return self.name.startswith("gfx")

    @property
    def has_tma(self) -> bool:
        """Whether it has TMA, which moves tiles by descriptors."""
        return not self.is_amd and int(self.name[3:]) >= 90

    def planned_for(
        self,
        shape: table.ShapeClass | None = None,
        with_tma: bool = True,
        warp_specialized: bool | None = False,
        tf32: bool = False,
    ) -> select.Target:
        """Return the target to plan launches for, with tiles by `tiles_of`.

        With `warp_specialized`, such kernels are used where the table has them; None: by the default of the target.
        """
        from fusedmlp.kernels.tiles import select, table

        tiles = tiles_of(table.TABLES[self.name], shape, with_tma)
        # 100 multiprocessors: the number of programs changes a launch's grid, not its kernel.
        return select.Target(self.name, 100, tiles, warp_specialized, tf32)

    @property
    def triton(self) -> GPUTarget:
        """The same target as Triton's compiler takes it: backend, architecture, warp size."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", self.name, 64) if self.is_amd else GPUTarget("cuda", int(self.name[3:]), 32)


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (less 1 KiB a block, which is reserved);
# AMD CDNA 3 and CDNA 4 ISA guides.
_SHARED_KIB = {
    "sm_80": 163,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
    "gfx950": 160,
}
TARGETS = {name: Target(name, kib * 1024) for name, kib in _SHARED_KIB.items()}


def tiles_of(tiles: table.Tiles, shape: table.ShapeClass | None, with_tma: bool = True) -> table.Tiles:
    """Tiles of which every load gets those of `shape` (None: each load its own).

    Without `with_tma`, tiles that need descriptors are left out, as if weights were in separate allocations.
    """
    from fusedmlp.kernels.tiles import table

    kept = {key: tile for key, tile in tiles.items() if with_tma or key.path not in table.BY_DESCRIPTORS}
    if shape is None:
        return kept
    every = get_args(table.ShapeClass)
    return {key._replace(shape=own): tile for key, tile in kept.items() if key.shape == shape for own in every}
