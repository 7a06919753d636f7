"""Tile sizes as data: one line for each architecture, pass, path, format and load.

`M` rows, `N` output and `K` input features of an M-ragged GEMM; for wgrad `BLOCK_K` is the tile of input features
and `BLOCK_M` the rows taken per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import triton

PASSES = ("fc1_act", "gemm", "dgrad_act", "wgrad")
# How operands reach a multiprocessor. warp_specialized: by descriptors (TMA), in those kernels; tma: by descriptors;
# gather: by descriptors, but for one operand, whose rows are gathered by pointers; pointer: by vector loads;
# unaligned: element by element.
Path = Literal["warp_specialized", "tma", "gather", "pointer", "unaligned"]
BY_DESCRIPTORS: tuple[Path, ...] = ("warp_specialized", "tma", "gather")
# Element type of the activations, which weights share; of operands in 8 bits, the recipe.
Format = Literal["bf16", "fp16", "fp32", "fp8_block", "mxfp8"]
FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Ways to quantize activations and weights to 8 bits (`operators/torch_quantize.py` of the library), by architecture.
Recipe = Literal["fp8_block", "mxfp8"]
RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    "sm_80": (),
    "sm_90": ("fp8_block",),
    "sm_100": ("mxfp8",),
    "sm_120": ("mxfp8",),
    "gfx942": (),
    "gfx950": ("mxfp8",),
    "interpreter": get_args(Recipe),
}
ShapeClass = Literal["short", "long"]
# Mean rows per expert below which a shape is "short".
SHORT_ROWS = 64
# For a warp-specialized kernel of Hopper, the reason for its ring and epilogue. gemm, dgrad_act: "small" if what they
# contract, and gemm's columns, are at most SMALL. wgrad: whether MMAs or memory limit it, and whether it adds to
# main_grad or writes it. Memory does below FLOPS_A_BYTE of the card.
Regime = Literal["any", "small", "mma_add", "mma_write", "memory_add", "memory_write"]
SMALL = 2048
# Dense bf16 products over copies, both measured: 803 TFLOP/s and 4.30 TB/s, 800 and 3.03. On the H100, rings for MMAs
# took 1 to 16% longer than Triton kernels where wgrad adds and all its traffic is the limit: in sonic-a, sonic-b and
# gpt-oss-20b. Where main_grad was loaded ahead, they took 22 to 24% less (qwen3-30b-8k, qwen3.5).
FLOPS_A_BYTE = {"H200": 187, "H100": 264}


def small(*sizes: int) -> Regime:
    """The regime of a gemm or of dgrad_act with these sizes."""
    return "small" if max(sizes) <= SMALL else "any"


def regime_of_wgrad(flops: float, moved: float, accumulate: bool, flops_a_byte: float) -> Regime:
    """The regime of a wgrad with so many FLOPs and bytes of traffic, on a card that has so many FLOPs for a byte."""
    if flops < flops_a_byte * moved:
        return "memory_add" if accumulate else "memory_write"
    return "mma_add" if accumulate else "mma_write"


class SortFirst(NamedTuple):
    """Least FLOPs from which backward sorts rows of tokens by a copy, before kernels that would else gather them."""

    flops_a_byte: int  # least FLOPs of those kernels for each byte of a copy, read and written
    grad_flops_a_byte: int  # wgrad counts among them if it has so many for each byte of main_grad


# sm_90, on an H200 (ms: what sorted rows save in dgrad_act and wgrad of fc2; in wgrad of fc1; combine, which moves as
# many bytes as a copy): 0.56, 0.77 and 0.32 in sonic-c, 0.14, 0.21 and 0.09 in qwen3-30b-8k, 0.06, 0.16 and 0.18 in
# sonic-a. They save in proportion to FLOPs, and for each byte of a copy there are F: 1,024, 768 and 256. On an H100,
# with 160 rows an expert (40 FLOPs for a byte of main_grad) both wgrads took as long with gathered rows, as main_grad
# is the limit; with 512 rows (128 FLOPs) they did not.
SORT_FIRST: Mapping[tuple[str, Format, ShapeClass], SortFirst] = {
    ("sm_90", "bf16", "long"): SortFirst(600, FLOPS_A_BYTE["H200"] // 2),
    ("sm_90", "fp16", "long"): SortFirst(600, FLOPS_A_BYTE["H200"] // 2),
    # So that small tests have both.
    **{("interpreter", name, shape): SortFirst(5, 0) for name in FORMATS.values() for shape in get_args(ShapeClass)},
}


class Tile(NamedTuple):
    """Launch configuration of a kernel, also its constexpr `TILE`. Lines of the table give the fields in this order."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    SUBTILES: int = 1  # column subtiles of the epilogue
    GROUP_M: int = 1  # M-tiles that share a weight tile while it is in L2
    PER_SM: int = 0  # persistent programs on one multiprocessor; 0: one program for each tile
    SLOTS: int = 0  # wgrad: subtiles of main_grad that each consumer loads ahead; 0: TMA adds


class Key(NamedTuple):
    """Key of a tile in an architecture's table. Where versions of Triton differ, a table is that of the one in use."""

    kernel: str
    path: Path
    format: Format
    shape: ShapeClass
    gathered: bool = False  # whether rows of an operand are gathered; where that matters, on path warp_specialized
    regime: Regime = "any"


Tiles = Mapping[Key, Tile]
_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
_LINES = """
# architectures                 pass      path             formats   load    M   N   K warps stages SUBTILES GROUP SM
# Warp-specialized, for long loads alone. sm_90: one warp loads and two warpgroups multiply, each half of a tile's rows
# (`warp_specialized/sm_90.py`). sm_100: one warp loads, one multiplies, into accumulators of two tiles in turn, and
# eight write (`warp_specialized/sm_100.py`). Its dgrad_act and wgrad have narrow subtiles, whose buffers leave shared
# memory for a fourth stage. fc1's tile also serves weights [H, 2F], whose halves come by two loads a step; no GPU has
# timed those. In fc1 of 8 bits, N are channels of both halves together. A load may be followed by
# /gathered and by a regime.
#
# Lines of sm_90 in 16 bits were measured on an H200 (ms, this line and the one before it in time). gemm, small: fc2 of
# qwen3-30b-8k 0.302 and 0.318. dgrad_act, small: 0.385 and 0.415 there; the other line 1.65 and 1.70 in sonic-c. wgrad
# that adds: 32 rows by 8 stages 3.19 and 3.57 in fc1 of sonic-c, 5.60 and 6.3 in mixtral; main_grad loaded ahead 1.09
# and 1.49 in fc1 of qwen3. wgrad that writes: 64 rows by 3 stages 3.00 and 3.04 in fc1 of sonic-c, 5.21 and 5.35 in
# mixtral; 32 rows by 8 stages 0.77 and 0.81 in fc1 of qwen3. Gathered, fc1: 64 rows by 4 stages 4.04 and 4.10 in
# sonic-c, by 3 stages with main_grad loaded ahead 1.37 and 1.54 in qwen3; there, 32 rows by 6 stages took 5.2 and 1.73.
sm_90                           fc1_act   warp_specialized bf16,fp16 long,long/gathered 128 128 64 4 3 2 8 1
sm_100                          fc1_act   warp_specialized bf16,fp16 long,long/gathered 128 128 64 8 4 4 8 1
sm_90                           gemm      warp_specialized bf16,fp16 long  128 256  64   4   3   1   8   1
sm_90                           gemm      warp_specialized bf16,fp16 long/small  128 256  64   4   4   4   8   1
sm_90                           fc1_act   warp_specialized fp8_block long  128 256 128   4   4   4   8   1
sm_90                           gemm      warp_specialized fp8_block long  128 256 128   4   4   4   8   1
sm_100                          fc1_act   warp_specialized mxfp8     long  128 256 128   8   3   4   8   1
sm_100                          gemm      warp_specialized mxfp8     long  128 256 128   8   3   4   8   1
sm_100                          gemm      warp_specialized bf16,fp16 long  128 256  64   8   4   4   8   1
sm_90                           dgrad_act warp_specialized bf16,fp16 long,long/gathered 128 256 64 4 3 8 8 1
sm_90                           dgrad_act warp_specialized bf16,fp16 long/small,long/gathered/small 128 256 32 4 6 8 8 1
sm_100                          dgrad_act warp_specialized bf16,fp16 long,long/gathered 128 256 64 8 4 16 8 1
sm_90                           wgrad     warp_specialized bf16,fp16 long/mma_add     32 128 256 4 8 8 16 1
sm_90                           wgrad     warp_specialized bf16,fp16 long/memory_write 32 128 256 4 8 8 16 1
sm_90                           wgrad     warp_specialized bf16,fp16 long/mma_write 64 128 256 4 3 4 16 1
sm_90                           wgrad     warp_specialized bf16,fp16 long/memory_add 32 128 256 4 6 8 16 1 4
sm_90                           wgrad     warp_specialized bf16,fp16 long/gathered/memory_add 64 128 256 4 3 8 16 1 4
sm_90                           wgrad     warp_specialized bf16,fp16 long/gathered/mma_add 64 128 256 4 4 8 16 1
sm_90                           wgrad     warp_specialized bf16,fp16 long/gathered/mma_write 64 128 256 4 4 8 16 1
sm_90                           wgrad     warp_specialized bf16,fp16 long/gathered/memory_write 64 128 256 4 4 8 16 1
sm_90                           wgrad     warp_specialized fp8_block long  128 128 256   4   3   8  16   1
sm_90                           wgrad     warp_specialized fp8_block long/memory_add 128 128 256 4 3 8 16 1 4
sm_100                          wgrad     warp_specialized mxfp8     long  128 128 256   8   3   8  16   1
sm_100                          wgrad     warp_specialized bf16,fp16 long,long/gathered 64 128 256 8 4 8 16 1
# M-ragged passes have accumulators of 128 x 256 (fc1: 128 channels of each half), because at 128 x 128 the operands
# come from L2 at 64 FLOPs a byte, more than L2 delivers at full speed. Such programs fill a multiprocessor, so they
# are persistent: `flatten` in the kernel then loads a tile's first operands under the stores of the tile before.
# wgrad: few rows per expert leave it bound by the traffic of main_grad, so two small programs share a multiprocessor,
# and one adds while the other multiplies. Many rows: the largest tile, for the fewest loads of its operands. sm_100 has
# no tile for fp32: Triton 3.7.1 transposes 32-bit operands of tcgen05 through one buffer, which the next step
# overwrites while the last one is still multiplied, a race; by pointers there is none.
sm_90                           fc1_act   tma              bf16,fp16 short  64  64  64   4   4   2   8   2
sm_100                          fc1_act   tma              bf16,fp16 short  64  64  64   4   4   4   8   2
sm_90,sm_100                    fc1_act   tma              bf16,fp16 long  128 128  64   8   4   4   8   1
sm_90,sm_100                    gemm      tma              bf16,fp16 short  64 128  64   4   3   1   8   2
sm_90,sm_100                    gemm      tma              bf16,fp16 long  128 256  64   8   4   2   8   1
sm_90                           dgrad_act tma              bf16,fp16 short  64  64  64   4   4   2   8   2
sm_100                          dgrad_act tma              bf16,fp16 short  64  64  64   8   4   4   8   2
sm_90,sm_100                    dgrad_act tma              bf16,fp16 long  128 128  64   8   4   4   8   1
sm_90,sm_100                    wgrad     tma              bf16,fp16 short  64 128 128   4   3   4   8   2
sm_90,sm_100                    wgrad     tma              bf16,fp16 long   64 128 256   8   4   4  16   1
sm_90                           wgrad     tma              fp32      any    32 128 128   8   4   4   8   1
# Where fc1 gathers rows, programs are not persistent: addresses of two tiles at once need more registers than there
# are. wgrad: loads of indices take some of the stages, and addresses take registers, so there are more stages and
# threads, to have as much on its way. gemm gathers rows for adapters alone, whose A has few rows.
sm_90                           fc1_act   gather           bf16,fp16 short  64  64  64   4   4   2   8   0
sm_100                          fc1_act   gather           bf16,fp16 short  64  64  64   4   4   4   8   0
sm_90                           fc1_act   gather           bf16,fp16 long  128 128  32   8   6   8   8   0
sm_100                          fc1_act   gather           bf16,fp16 long  128 128  64   8   4   4   8   0
sm_90,sm_100                    gemm      gather           bf16,fp16 short  64  64  64   4   4   1   8   0
sm_90,sm_100                    gemm      gather           bf16,fp16 long  128  64  64   8   4   1   8   0
sm_90,sm_100                    dgrad_act gather           bf16,fp16 short  64  64  64   4   4   2   8   2
sm_90,sm_100                    dgrad_act gather           bf16,fp16 long  128 128  64   8   4   4   8   1
sm_90,sm_100                    wgrad     gather           bf16,fp16 short  64 128 128   8   4   4   8   2
sm_90,sm_100                    wgrad     gather           bf16,fp16 long   64 128 256   8   6   4  16   1
# One program for each tile in M-ragged passes: two or three share a multiprocessor and cover each other's epilogues,
# and programs that find no tile left end at once. Some lines differ from the others in SUBTILES alone: with their value
# that architecture spills a few bytes, because the compiler prefers spills to fewer programs on a multiprocessor.
sm_80,sm_90,sm_100,sm_120       fc1_act   pointer          bf16,fp16 short  64  64  64   4   3   2   8   0
gfx942,gfx950                   fc1_act   pointer          bf16,fp16 short  64  64  64   4   2   1   8   0
sm_80,sm_90,sm_120              fc1_act   pointer          bf16,fp16 long  128  64  64   8   3   2   8   0
sm_100                          fc1_act   pointer          bf16,fp16 long  128  64  64   8   3   4   8   0
gfx942,gfx950                   fc1_act   pointer          bf16,fp16 long  128  64  64   8   2   1   8   0
sm_80,sm_100,sm_120,gfx942,gfx950 fc1_act   pointer          fp32      any    64  32  32   4   3   4   8   0
sm_90                           fc1_act   pointer          fp32      any    64  32  32   4   3   2   8   0
sm_80,sm_90,sm_100,sm_120       gemm      pointer          bf16,fp16 short  64  64  64   4   3   1   8   0
gfx942,gfx950                   gemm      pointer          bf16,fp16 short  64  64  64   4   2   1   8   0
sm_80,sm_90,sm_100,sm_120       gemm      pointer          bf16,fp16 long  128 128  64   8   3   2   8   0
gfx942,gfx950                   gemm      pointer          bf16,fp16 long  128 128  64   8   2   1   8   0
sm_80,sm_90,sm_120,gfx942,gfx950 gemm      pointer          fp32      any    64  64  32   4   3   1   1   0
sm_100                          gemm      pointer          fp32      any    64  64  32   4   3   2   1   0
sm_80,sm_90                     dgrad_act pointer          bf16,fp16 short  64  64  64   4   3   2   8   0
sm_100                          dgrad_act pointer          bf16,fp16 short  64  64  64   4   3   4   8   0
sm_120                          dgrad_act pointer          bf16,fp16 short  64  32  64   4   3   4   8   0
gfx942,gfx950                   dgrad_act pointer          bf16,fp16 short  64  64  64   4   2   2   8   0
sm_80,sm_90,sm_100,sm_120       dgrad_act pointer          bf16,fp16 long  128  64  64   8   3   2   8   0
gfx942,gfx950                   dgrad_act pointer          bf16,fp16 long  128  64  64   8   2   2   8   0
sm_80,sm_90,gfx942,gfx950       dgrad_act pointer          fp32      any    64  32  32   4   3   2   8   0
sm_100                          dgrad_act pointer          fp32      any    64  32  32   4   3   4   8   0
sm_120                          dgrad_act pointer          fp32      any    64  32  32   4   3   8   8   0
sm_80                           wgrad     pointer          bf16,fp16 any    32 128 128   8   4   4   8   2
sm_90,sm_120                    wgrad     pointer          bf16,fp16 any    32 128 128   8   4   2   8   2
sm_100                          wgrad     pointer          bf16,fp16 any    64 128 128   8   3   4   8   2
gfx942,gfx950                   wgrad     pointer          bf16,fp16 any    64 128  64   4   2   2   8   2
sm_80                           wgrad     pointer          fp32      any    16  32  64   4   3   1   8   4
sm_90                           wgrad     pointer          fp32      any    16  32  64   4   3   2   8   4
sm_100                          wgrad     pointer          fp32      any    32 128 128   8   3   8   8   2
sm_120                          wgrad     pointer          fp32      any    16  32  64   4   3   4   8   4
gfx942,gfx950                   wgrad     pointer          fp32      any    32  64  64   4   2   2   8   4
# Recipe mxfp8 without tensor memory. Tiles have the 128 rows of a copy's, and steps the 128 elements of 512 bytes of
# scales. A byte of operands serves 128 FLOPs, twice as many as in 16 bits. sm_120: 8 warps, as 4 spill; one program
# takes most registers of a multiprocessor. gfx950: 4 warps, since a wave of 64 x 64 reads LDS 16 times for 8 MFMAs, and
# one of 64 x 32 12 times for 4.
sm_120                          gemm      pointer          mxfp8     long  128 128 128   8   3   2   8   0
gfx950                          gemm      pointer          mxfp8     long  128 128 128   4   2   2   8   0
sm_120                          wgrad     pointer          mxfp8     long  128 128 128   8   2   4   8   1
gfx950                          wgrad     pointer          mxfp8     long  128 128 128   4   2   2   8   2
# An address for each element that a thread loads: small tiles, for many threads.
all                             fc1_act   unaligned        bf16,fp16 any    64  64  32   8   2   4   8   0
sm_80                           fc1_act   unaligned        fp32      any    32  32  16   4   2   4   8   0
sm_90,sm_100,sm_120,gfx942,gfx950 fc1_act   unaligned        fp32      any    32  32  16   4   2   2   8   0
all                             gemm      unaligned        bf16,fp16 any    64  64  32   8   2   4   8   0
all                             gemm      unaligned        fp32      any    32  32  16   4   2   2   8   0
sm_80,sm_90                     dgrad_act unaligned        bf16,fp16 any    64  64  32   8   2   4   8   0
sm_100,sm_120,gfx942,gfx950     dgrad_act unaligned        bf16,fp16 any    64  64  32   8   2   2   8   0
sm_80,sm_100,gfx942,gfx950      dgrad_act unaligned        fp32      any    32  32  16   4   2   2   8   0
sm_90,sm_120                    dgrad_act unaligned        fp32      any    32  32  16   4   2   4   8   0
all                             wgrad     unaligned        bf16,fp16 any    32 128 128   8   2   2   8   2
sm_80,sm_90                     wgrad     unaligned        fp32      any    16  32  64   8   2   4   8   2
sm_100,sm_120,gfx942,gfx950     wgrad     unaligned        fp32      any    16  32  64   8   2   2   8   2
# Small tiles, so that small tests have several.
interpreter                     fc1_act,gemm,dgrad_act,wgrad tma,gather bf16,fp16,fp32 any 16 32 32 1 1 2 2 1
interpreter                     fc1_act,gemm,dgrad_act,wgrad pointer,unaligned bf16,fp16,fp32 any 16 32 32 1 1 1 2 0
"""
# Triton 3.8 alone spills in dgrad_act's long tile of sm_100 with four subtiles.
_LINES_OF_TRITON_3_8 = """
sm_100                          dgrad_act tma              bf16,fp16 long  128 128  64   8   4   8   8   1
"""
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def _tables(lines: str) -> dict[str, dict[Key, Tile]]:
    """By architecture. Each column of a line may name several, joined by commas."""
    words = {"all": _ARCHITECTURES, "any": get_args(ShapeClass)}
    tables: dict[str, dict[Key, Tile]] = {}
    for line in lines.splitlines():
        if line and not line.startswith("#"):
            *columns, sizes = line.split(maxsplit=5)
            tile = Tile(*map(int, sizes.split()))
            for name, *names, load in product(*(words.get(column) or column.split(",") for column in columns)):
                key: list[Any] = [*names, *_load(load)]
                full_key = Key(*key)
                if tables.setdefault(name, {}).setdefault(full_key, tile) is not tile:
                    raise ValueError(f"{line!r}: another line has a tile of {name} for {full_key}")
    return tables


def _load(text: str) -> tuple[ShapeClass, bool, Regime]:
    """Shape class, whether rows are gathered, and regime."""
    shape, *more = text.split("/")
    (regime,) = [word for word in more if word != "gathered"] or ["any"]
    return cast(ShapeClass, shape), "gathered" in more, cast(Regime, regime)


TABLES = _tables(_LINES)
if TRITON == (3, 8):
    TABLES["sm_100"] |= _tables(_LINES_OF_TRITON_3_8)["sm_100"]


@lru_cache
def row_blocks(architecture: str) -> tuple[int, ...]:
    """Every BLOCK_M that the M-ragged passes' tables have: plans hold a table of tiles for each."""
    return tuple(sorted({tile.BLOCK_M for key, tile in TABLES[architecture].items() if key.kernel != "wgrad"}))


def shape_class(rows_per_expert: float) -> ShapeClass:
    """The class of a load, by its mean."""
    return "short" if rows_per_expert < SHORT_ROWS else "long"
