"""A warp's costs of a step along the reduction, and of a tile beside its steps: the numbers behind a kernel's speed.

They are read from the SASS on NVIDIA GPUs, where ptxas has placed waits and moved addresses, and from the assembly on
AMD's. A step is a turn of the loop in Triton's IR: where LLVM or ptxas has unrolled it, numbers are divided by how many
steps the MMAs of the code's loop are. On AMD's GPUs, a step is a turn of the loop in the assembly.

Refused by name, with `UnreadLoop`: loops that are unrolled completely, by a compiler or as `tl.static_range`, alone or
in a loop over tiles, because nothing separates a step from the rest; and loops in which several dots of a turn add to
one accumulator, as Triton's `loop_unroll_factor` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.proof import assembly, loops, ttgir
from bench.proof.assembly import Instruction
from bench.proof.cubin import disassemblies
from bench.proof.loops import Loop, count
from bench.proof.ttgir import Steps

_ADDRESS = re.compile(r"\[([^\]]+)\]")


class UnreadLoop(Exception):
    """A loop whose steps cannot be told apart; says what was expected and what came."""


class MainLoop(NamedTuple):
    """Costs of a step for a warp that multiplies, then of a tile beside its steps, each instruction counted once. Where
    other warps store, the costs of a tile are for one of those.
    """

    instructions: float
    mma: float
    waits: float  # for operands, copies and MMAs
    barriers: float  # of the whole block
    # Commit groups that the strictest wait leaves running; None: MMAs are synchronous. If it leaves none: 1 where it
    # stands before a step's MMAs, so that those of the step before run during most of a step; 0 where it stands after.
    mma_in_flight: int | None
    loads_in_flight: int | None  # commit groups of cp.async, likewise; None: there is no such wait
    tile_instructions: int
    tile_stores: int  # to global memory: of TMA and of threads, reductions among them
    tile_waits: int  # for stores, and for the last operands and MMAs
    tile_barriers: int
    # 1: steps and tiles are one loop, or other warps load, so that a tile's first loads run during the stores of the
    # tile before; 2: other warps load and store, so that a tile's MMAs run then, too; 0: neither.
    joined: int


def of(compiled: Sequence[Any]) -> list[MainLoop | UnreadLoop | None]:
    """Costs of each `CompiledKernel` for one GPU, or why its steps cannot be read; None if it has no MMAs."""
    if compiled and "amdgcn" in compiled[0].asm:
        return [_read_or_refuse(assembly.gcn(each.asm["amdgcn"])) for each in compiled]
    sources = {index: assembly.ptx(each.asm["ptx"]) for index, each in enumerate(compiled)}
    multiply = [index for index, source in sources.items() if count(source, "mma")]
    cubins = [compiled[index].asm["cubin"] for index in multiply]
    listings = disassemblies(cubins, compiled[0].metadata.target.arch) if cubins else []
    found: list[MainLoop | UnreadLoop | None] = [None] * len(compiled)
    for index, listing in zip(multiply, listings, strict=True):
        steps = ttgir.steps(compiled[index].asm)
        found[index] = _read_or_refuse(assembly.sass(listing), sources[index], steps)
    return found


def _read_or_refuse(
    code: Sequence[Instruction], ptx: Sequence[Instruction] = (), steps: Steps | None = None
) -> MainLoop | UnreadLoop | None:
    try:
        return read(code, ptx, steps)
    except UnreadLoop as error:
        return error


def sass_of(compiled: Any) -> list[Instruction]:
    """The SASS of one `CompiledKernel`."""
    return assembly.sass(disassemblies([compiled.asm["cubin"]], compiled.metadata.target.arch)[0])


def spills_in_a_step(code: Sequence[Instruction]) -> bool:
    """Look for loads and stores of spilled registers in a step of the loop that multiplies; True if there is no such
    loop.
    """
    loop = loops.multiplying(code)
    return loop is None or any(code[i].opcode.startswith(("LDL", "STL")) for i in loops.steady(code, loop))


def read(code: Sequence[Instruction], ptx: Sequence[Instruction] = (), steps: Steps | None = None) -> MainLoop | None:
    """Read the costs from AMD's assembly, or from the SASS that was made of `ptx` and before that of TTGIR's `steps`.

    None if there are no MMAs; without `steps`, a step is a turn of the loop in `code`. Raises `UnreadLoop`.
    """
    if not count(code, "mma"):
        return None
    loop = loops.multiplying(code)
    if loop is None:
        mma = count(code, "mma")
        raise UnreadLoop(
            f"expected a loop that multiplies; got {mma} MMAs in no loop, as if it were unrolled completely"
        )
    indices = loops.steady(code, loop)
    path = [code[index] for index in indices]
    unrolled = _steps_of(code, path, steps)
    source = loops.multiplying(ptx)
    step = [ptx[index] for index in sorted(source.body)] if source else []
    is_tcgen05 = any(each.opcode.startswith("UTC") for each in path)
    joined = _joined(code, loop, path, is_tcgen05)
    tile = loops.beside(code, loop, indices, apart=joined == 2)
    return MainLoop(
        round(len(path) / unrolled, 1),
        round(count(path, "mma") / unrolled, 1),
        round(count(path, "wait") / unrolled, 1),
        round(count(path, "barrier") / unrolled, 1),
        _tcgen05_in_flight(step) if is_tcgen05 else _wgmma_in_flight(path),
        _left_by("DEPBAR", path),
        len(tile),
        count(tile, "store"),
        count(tile, "wait"),
        count(tile, "barrier"),
        joined,
    )


def _steps_of(code: Sequence[Instruction], path: Sequence[Instruction], steps: Steps | None) -> int:
    """Number of steps in a turn of the loop, which takes this path."""
    mma, stores = count(path, "mma"), count(path, "store")
    if not mma:
        raise UnreadLoop("expected a path with MMAs through the loop that multiplies; found none")
    if stores:
        raise UnreadLoop(
            f"expected a loop over steps; got one with {stores} stores in a turn: steps are unrolled completely"
        )
    if steps is None:
        return 1
    if steps.dots > 1:
        raise UnreadLoop(
            f"expected one dot for each accumulator in a turn; got {steps.dots}: steps are unrolled by Triton"
        )
    if not steps.mma or mma % steps.mma:
        raise UnreadLoop(f"expected steps of {steps.mma} MMAs, as in TTGIR; got {mma} MMAs in a turn")
    number = loops.number_multiplying(code)
    if mma > steps.mma and number < steps.loops:
        raise UnreadLoop(
            f"expected {steps.loops} loops with MMAs, as in TTGIR; got {number}: steps are unrolled completely"
        )
    return mma // steps.mma


def _joined(code: Sequence[Instruction], loop: Loop, path: Sequence[Instruction], is_tcgen05: bool) -> int:
    if is_tcgen05 and not count(path, "load") + count(path, "barrier"):
        return 2
    loaded_by_others = not count(path, "load") and any(each.opcode.startswith("UTMALDG") for each in code)
    return int(loaded_by_others or loops.stores(code, loop))


def _left_by(wait: str, path: Sequence[Instruction]) -> int | None:
    """Groups that the strictest of such waits leaves running; the number is its last operand."""
    waits = (each for each in path if each.kind == "wait" and each.opcode.startswith(wait))
    return min((int(each.operands.split()[-1], 16) for each in waits), default=None)


def _wgmma_in_flight(path: Sequence[Instruction]) -> int | None:
    if left := _left_by("WARPGROUP", path):
        return left
    events = []
    for each in path:
        if each.kind == "mma":
            events.append("commit" if "gsb0" in each.operands else "mma")
        else:
            events.append("wait" if _left_by("WARPGROUP", [each]) == 0 else "")
    return left if left is None else int(_run_during_most(events))


def _tcgen05_in_flight(step: Sequence[Instruction]) -> int | None:
    """Read a step of the PTX, in which a wait leaves no MMAs running if the last ones arrive at its mbarrier."""
    events, last = [], None
    for each in (*step, *step):
        at = found[1] if (found := _ADDRESS.search(each.operands)) else None
        if each.opcode.startswith("tcgen05.commit"):
            last = at
            events.append("commit")
        elif each.kind == "wait":
            events.append("wait" if at and at == last else "")
        else:
            events.append("mma" if each.kind == "mma" else "")
    turn = events[len(step) :]
    return None if "commit" not in turn else int("wait" not in turn or _run_during_most(turn))


def _run_during_most(turn: Sequence[str]) -> bool:
    """True if MMAs run during most of a loop's turn, without the instructions that issue them.

    Events are "mma", "commit" of a group of MMAs, "wait" for all of them, and others. The next turn has the same, so it
    does not matter where the loop begins.
    """
    states = [""]
    for event in (*turn, *turn):
        states.append({"mma": "issue", "commit": "run", "wait": "idle"}.get(event, states[-1]))
    last = states[-len(turn) :]
    return last.count("run") > last.count("idle")
