"""One name for each part of Gluon, Triton's lower level, that warp-specialized kernels use: versions of Triton differ.

These are partitions of warps, tiles in shared memory, mbarriers, TMA, and the wgmma and tcgen05 instructions that a
kernel issues itself. Where a name is missing, importing this module raises, and `gluon_missing` says why.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon as gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import blackwell, hopper

gl = language
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of the warps of one partition

mbarrier = hopper.mbarrier
fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_init = hopper.warpgroup_mma_init
warpgroup_mma_wait = hopper.warpgroup_mma_wait
tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
tma_store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
tma_store_wait = hopper.tma.store_wait

TensorMemoryLayout = blackwell.TensorMemoryLayout
TensorMemoryScalesLayout = blackwell.TensorMemoryScalesLayout
allocate_tensor_memory = blackwell.allocate_tensor_memory
tcgen05_commit = blackwell.tcgen05_commit
tcgen05_copy = blackwell.tcgen05_copy
tcgen05_mma = blackwell.tcgen05_mma
tcgen05_mma_scaled = blackwell.tcgen05_mma_scaled
tma_gather = blackwell.tma.async_gather


@_core.builtin
def tma_add(desc, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory; not every version of Gluon has a name for the operation."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, tile.handle)
