"""Names of Gluon, Triton's lower level, which differ between Triton 3.6, 3.7 and 3.9: here one for each.

What the specialised kernels need beside Triton: partitions of warps, tiles in shared memory, mbarriers, TMA,
and wgmma and tcgen05 instructions that a kernel issues itself. Where a name is missing, importing this raises, and
`gluon_missing` says why.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.blackwell import tma as blackwell_tma
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

__all__ = [
    "TensorMemoryLayout",
    "allocate_tensor_memory",
    "barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tcgen05_commit",
    "tcgen05_mma",
    "tma_add",
    "tma_gather",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
tma_gather = blackwell_tma.async_gather
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of the warps of one task


@_core.builtin
def tma_add(desc, coordinates, tile, _semantic=None):
    """Adds a tile in shared memory to global memory; not every version of Gluon has a name for the operation."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, tile.handle)
