"""One name for each part of Gluon, Triton's lower level, that warp-specialized kernels use: versions of Triton differ.

These are partitions of warps, tiles in shared memory, mbarriers, TMA, `cp.async`, and the wgmma and tcgen05
instructions that a kernel issues itself. Where a name is missing, importing this module raises, and `gluon_missing`
says why.
"""

from collections.abc import Callable
from typing import Any, dataclass_transform

from triton._C.libtriton import ir
from triton.experimental import gluon as gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import ampere, blackwell, hopper
from triton.language import core

gl = language
value = core.base_value  # the annotation of an aggregate's field that is known at run time, or is None
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of the warps of one partition

mbarrier = hopper.mbarrier
fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_init = hopper.warpgroup_mma_init
warpgroup_mma_wait = hopper.warpgroup_mma_wait
tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
tma_store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
tma_store_wait = hopper.tma.store_wait
copy_async = getattr(ampere.async_copy, "async_load", None) or ampere.async_copy.async_copy_global_to_shared
copy_arrive = ampere.async_copy.mbarrier_arrive
copy_commit = ampere.async_copy.commit_group
copy_wait = ampere.async_copy.wait_group

TensorMemoryLayout = blackwell.TensorMemoryLayout
TensorMemoryScalesLayout = blackwell.TensorMemoryScalesLayout
allocate_tensor_memory = blackwell.allocate_tensor_memory
tcgen05_commit = blackwell.tcgen05_commit
tcgen05_copy = blackwell.tcgen05_copy
tcgen05_mma = blackwell.tcgen05_mma
tcgen05_mma_scaled = blackwell.tcgen05_mma_scaled
tma_gather = blackwell.tma.async_gather


@dataclass_transform()
def aggregate(cls: Any) -> Any:
    """Make a class of values that kernels pass to partitions: fields are arguments of its constructor, in this order.

    Methods are functions with `gluon.jit`. The last fields may have defaults. Triton 3.7 makes no constructor itself.
    """
    names = tuple(cls.__annotations__)
    defaults = tuple(vars(cls)[name] for name in names if name in vars(cls))
    # Triton 3.8 allows no other base than an aggregate: those of its methods are copied.
    inherited = {name: member for base in cls.__mro__[-2:0:-1] for name, member in vars(base).items()}
    members = {**inherited, **vars(cls)}
    cls = type(cls.__name__, (), {name: members[name] for name in members if name not in ("__dict__", "__weakref__")})

    def __init__(self: Any, *values: Any) -> None:
        missing = len(names) - len(values)
        for name, given in zip(names, values + defaults[len(defaults) - missing :], strict=True):
            setattr(self, name, given if isinstance(given, value) else gl.constexpr(given))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]  # its source is no part of a kernel's
    cls.__init__ = __init__
    return core._aggregate(cls)


def named(pass_name: str, scales: str) -> Callable[[Any], str]:
    """`repr` of a kernel: its name in profiles, with the recipe of 8-bit operands, whose `scales` are not None."""

    def name(specialization: Any) -> str:
        kind = specialization.signature[scales]
        operands = "warp_specialized" if kind == "constexpr" else "fp8_block" if "fp32" in kind else "mxfp8"
        return f"grouped_{pass_name}_{operands}_kernel"

    return name


@_core.builtin
def tma_add(desc, coordinates, tile, _semantic=None):
    """Add a tile in shared memory to global memory; not every version of Gluon has a name for the operation."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, tile.handle)


@_core.builtin
def reinterpreted(tiles, shape, _semantic=None):
    """The same shared memory as tiles of another shape; versions of Gluon name the method differently."""
    shape = [_core._unwrap_if_constexpr(size) for size in shape]
    return _semantic.memdesc_reinterpret(tiles, tiles.dtype, shape, tiles.layout)
