"""A warp's costs of a step along the reduction, and of a tile beside its steps: the numbers behind a kernel's speed.

They are read from the SASS on NVIDIA GPUs, where ptxas has placed waits and moved addresses, and from the assembly on
AMD's. Where ptxas has unrolled the loop, a step has as many MMAs as the loop of the PTX; one of PTX is one of SASS.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.proof import assembly, loops
from bench.proof.assembly import Instruction
from bench.proof.cubin import disassemblies
from bench.proof.loops import Loop, count

_ADDRESS = re.compile(r"\[(%\w+)\]")


class MainLoop(NamedTuple):
    """Costs of a step for a warp that multiplies, then of a tile beside its steps, each instruction counted once. Where
    other warps store, the costs of a tile are for one of those.
    """

    instructions: float
    mma: float
    waits: float  # for operands, copies and MMAs
    barriers: float  # of the whole block
    mma_in_flight: int | None  # commit groups that the strictest wait leaves running; None: they are synchronous
    loads_in_flight: int | None  # commit groups of cp.async, likewise; None: there is no such wait
    tile_instructions: int
    tile_stores: int  # to global memory: of TMA and of threads, reductions among them
    tile_waits: int  # for stores, and for the last operands and MMAs
    tile_barriers: int
    # 1: steps and tiles are one loop, or other warps load, so that a tile's first loads run during the stores of the
    # tile before; 2: other warps load and store, so that a tile's MMAs run then, too; 0: neither.
    joined: int


def of(compiled: Sequence[Any]) -> list[MainLoop | None]:
    """Costs of each `CompiledKernel` for one GPU; None if no loop that multiplies on tensor cores is found."""
    if compiled and "amdgcn" in compiled[0].asm:
        return [read(assembly.gcn(each.asm["amdgcn"])) for each in compiled]
    sources = {index: assembly.ptx(each.asm["ptx"]) for index, each in enumerate(compiled)}
    multiply = [index for index, source in sources.items() if count(source, "mma")]
    cubins = [compiled[index].asm["cubin"] for index in multiply]
    listings = disassemblies(cubins, compiled[0].metadata.target.arch) if cubins else []
    listing = dict(zip(multiply, listings, strict=True))
    return [read(assembly.sass(listing[i]), source) if i in listing else None for i, source in sources.items()]


def sass_of(compiled: Any) -> list[Instruction]:
    """The SASS of one `CompiledKernel`."""
    return assembly.sass(disassemblies([compiled.asm["cubin"]], compiled.metadata.target.arch)[0])


def spills_in_a_step(code: Sequence[Instruction]) -> bool:
    """Look for loads and stores of spilled registers in a step of the loop that multiplies; True if there is no such
    loop.
    """
    loop = loops.multiplying(code)
    return loop is None or any(code[i].opcode.startswith(("LDL", "STL")) for i in loops.steady(code, loop))


def read(code: Sequence[Instruction], ptx: Sequence[Instruction] = ()) -> MainLoop | None:
    """Read the costs from AMD's assembly, or from the SASS that was made of `ptx`."""
    loop = loops.multiplying(code)
    if loop is None:
        return None
    indices = loops.steady(code, loop)
    if not indices:
        return None
    path = [code[index] for index in indices]
    source = loops.multiplying(ptx)
    step = [ptx[index] for index in source.body] if source else path
    unrolled = count(path, "mma") / count(step, "mma")
    is_tcgen05 = any(each.opcode.startswith("UTC") for each in path)
    joined = _joined(code, loop, path, is_tcgen05)
    tile = loops.beside(code, loop, indices, apart=joined == 2)
    return MainLoop(
        round(len(path) / unrolled, 1),
        round(count(path, "mma") / unrolled, 1),
        round(count(path, "wait") / unrolled, 1),
        round(count(path, "barrier") / unrolled, 1),
        _tcgen05_in_flight(step) if is_tcgen05 else _left_by("WARPGROUP", path),
        _left_by("DEPBAR", path),
        len(tile),
        count(tile, "store"),
        count(tile, "wait"),
        count(tile, "barrier"),
        joined,
    )


def _joined(code: Sequence[Instruction], loop: Loop, path: Sequence[Instruction], is_tcgen05: bool) -> int:
    if is_tcgen05 and not count(path, "load") + count(path, "barrier"):
        return 2
    loaded_by_others = not count(path, "load") and any(each.opcode.startswith("UTMALDG") for each in code)
    return int(loaded_by_others or loops.stores(code, loop))


def _left_by(wait: str, path: Sequence[Instruction]) -> int | None:
    """Groups that the strictest of such waits leaves running; the number is its last operand."""
    waits = (each for each in path if each.kind == "wait" and each.opcode.startswith(wait))
    return min((int(each.operands.split()[-1], 16) for each in waits), default=None)


def _tcgen05_in_flight(step: Sequence[Instruction]) -> int | None:
    """0 if a step of the PTX waits for the mbarrier that its own MMAs arrive at, 1 if for that of the step before."""
    waited, arrived = (
        {found[1] for each in step if each.opcode.startswith(opcode) and (found := _ADDRESS.search(each.operands))}
        for opcode in ("mbarrier.try_wait", "tcgen05.commit")
    )
    return None if not arrived else 0 if waited & arrived else 1
