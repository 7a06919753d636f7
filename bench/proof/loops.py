"""The loop that multiplies, the path of a step through it, and the instructions of a tile beside its steps.

Loops are natural loops: A. Aho, M. Lam, R. Sethi, J. Ullman, "Compilers", 9.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bench.proof.assembly import Instruction, Kind

_ENDS = ("EXIT", "RET", "ret", "exit", "s_endpgm")


class Loop(NamedTuple):
    """Indices in a listing. Past `end` is only code that compilers set apart as rarely run: a wait's second try."""

    head: int
    end: int  # the last branch to the head
    body: frozenset[int]


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """All natural loops, one for each head: the code that can come back to the head and is entered only there."""
    starts, successors = _blocks(code)
    predecessors: list[list[int]] = [[] for _ in starts]
    for block, following in enumerate(successors):
        for each in following:
            predecessors[each].append(block)
    ends = [*starts[1:], len(code)]
    found: dict[int, set[int]] = {}
    for head, before in enumerate(predecessors):
        entered = _reached(successors, 0, head) if before else set()
        if back := [block for block in before if block not in entered]:
            found[head] = {head}.union(*(_reached(predecessors, block, head) for block in back))
    result = []
    for head, body in found.items():
        indices = frozenset(index for block in body for index in range(starts[block], ends[block]))
        last = max(ends[block] - 1 for block in body if head in successors[block])
        # LLVM may print the end of a loop before its head, and sets nothing apart.
        result.append(Loop(starts[head], last if last >= starts[head] else max(indices), indices))
    return result


def _blocks(code: Sequence[Instruction]) -> tuple[list[int], list[list[int]]]:
    """Starts of basic blocks, and the successors of each."""
    starts = {0, *(each.target for each in code if each.target is not None)}
    starts |= {index + 1 for index, each in enumerate(code) if each.target is not None or _ends(each)}
    ordered = sorted(start for start in starts if start < len(code))
    number = {start: block for block, start in enumerate(ordered)}
    successors: list[list[int]] = []
    for _, end in pairwise([*ordered, len(code)]):
        last = code[end - 1]
        falls = not _ends(last) and (last.target is None or last.conditional)
        following = {last.target, end if falls else None}
        successors.append([number[index] for index in following if index in number])
    return ordered, successors


def _ends(each: Instruction) -> bool:
    return each.opcode.startswith(_ENDS) and not each.conditional


def _reached(following: Sequence[Sequence[int]], start: int, without: int) -> set[int]:
    """Blocks on paths from `start` that avoid the block `without`."""
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        block = waiting.pop()
        if block != without and block not in reached:
            reached.add(block)
            waiting.extend(following[block])
    return reached


def multiplying(code: Sequence[Instruction]) -> Loop | None:
    """The innermost loop with the most MMAs; other loops that multiply are remainders of an unrolled one."""
    products = {loop: count([code[index] for index in loop.body], "mma") for loop in loops(code)}
    found = [loop for loop, mma in products.items() if mma]
    innermost = [loop for loop in found if not any(other.body < loop.body for other in found)]
    return max(innermost, key=lambda loop: (products[loop], -loop.head), default=None)


def number_multiplying(code: Sequence[Instruction]) -> int:
    """The number of loops with MMAs in them: a loop over tiles and its steps are two."""
    return sum(any(code[index].kind == "mma" for index in loop.body) for loop in loops(code))


def steady(code: Sequence[Instruction], loop: Loop) -> list[int]:
    """Indices of the instructions of a step within a tile; empty if no path is found.

    A branch out of the loop, past its end or back within it is not taken (a wait succeeds). A forward branch is taken
    unless it leaps over MMAs or over loads of operands, which are a warp's work in a step. Code with stores is a tile's
    epilogue, whatever it loads.
    """
    path: list[int] = []
    index = loop.head
    while len(path) < len(loop.body):
        path.append(index)
        target, following = code[index].target, index + 1
        if target is not None:
            leaps = index < target <= loop.end and not _is_work(code[following:target])
            leaves = following not in loop.body
            if target == loop.head or not code[index].conditional or leaves or (target in loop.body and leaps):
                following = target
        if following == loop.head:
            return path
        index = following
        if index not in loop.body:
            break
    return []


def _is_work(part: Sequence[Instruction]) -> bool:
    kinds = {each.kind for each in part}
    return "mma" in kinds or ("load" in kinds and "store" not in kinds)


def beside(code: Sequence[Instruction], loop: Loop, path: Sequence[int], apart: bool = False) -> list[Instruction]:
    """Instructions of a tile beside its steps: its prologue and its epilogue, each instruction once.

    They are the rest of the loop over tiles, the innermost with stores (a loop over segments has none); where every
    tile has a program of its own, they are the rest of the kernel. If the loop that multiplies has stores, the compiler
    has joined the loops over steps and tiles. If other warps store (`apart`), they are the loop over tiles of those
    warps: the largest loop with stores that shares nothing with the loop that multiplies.
    """
    others = [other for other in loops(code) if apart and not other.body & loop.body and stores(code, other)]
    if others:
        tiles, steps = max(others, key=lambda other: len(other.body)), frozenset[int]()
    elif stores(code, loop):
        tiles, steps = loop, frozenset(path)
    else:
        around = [other for other in loops(code) if loop.body < other.body and stores(code, other)]
        whole = Loop(0, len(code) - 1, frozenset(range(len(code))))
        tiles, steps = min(around, key=lambda other: len(other.body), default=whole), loop.body
    return [code[index] for index in sorted(tiles.body - steps) if index <= tiles.end]


def stores(code: Sequence[Instruction], loop: Loop) -> bool:
    """Whether a loop has stores. If the loop that multiplies has, it joins steps and tiles, and the first loads of a
    tile run during the stores of the tile before.
    """
    return any(code[index].kind == "store" for index in loop.body)


def count(code: Sequence[Instruction], kind: Kind) -> int:
    """How many instructions are of that kind."""
    return sum(each.kind == kind for each in code)
