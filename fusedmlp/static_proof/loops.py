"""The loop that multiplies, the way through it within a tile, and what a tile costs beside.

Compilers print a loop's code in one piece, but for what hardly ever runs (a wait that was too short); so a loop is here
all that lies between the target of backward branches and the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusedmlp.static_proof.assembly import Instruction, Kind


class Loop(NamedTuple):
    """Places in a listing: of the first instruction and of the last backward branch to it."""

    head: int
    end: int

    def within(self, other: Loop) -> bool:
        """Whether it is a part of another loop."""
        return self != other and other.head <= self.head and self.end <= other.end


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """All of them, one for each target of backward branches."""
    ends = {each.target: place for place, each in enumerate(code) if each.target is not None and each.target <= place}
    return [Loop(head, end) for head, end in ends.items()]


def multiplying(code: Sequence[Instruction]) -> Loop | None:
    """Of the innermost loops that multiply the one with the most MMAs: others are remainders of an unrolled one."""
    products = {loop: count(code[loop.head : loop.end + 1], "mma") for loop in loops(code)}
    found = [loop for loop, mma in products.items() if mma]
    innermost = [loop for loop in found if not any(other.within(loop) for other in found)]
    return max(innermost, key=lambda loop: (products[loop], -loop.head), default=None)


def steady(code: Sequence[Instruction], loop: Loop) -> list[int]:
    """Places that a step within a tile goes through; empty if no way is found.

    A branch out of the loop or backward within it is not taken (a wait succeeds), and one to its head is. One forward
    is taken unless it leaps over MMAs or over loads of operands, which are the part of a warp in the step. Where there
    are stores is the epilogue of a tile, whatever it loads.
    """
    path: list[int] = []
    place = loop.head
    while place < len(code) and len(path) <= len(code):
        path.append(place)
        target = code[place].target
        if target == loop.head:
            return path
        taken = target is not None and (
            not code[place].conditional or (place < target <= loop.end and not _is_work(code[place + 1 : target]))
        )
        place = target if target is not None and taken else place + 1
    return []


def _is_work(part: Sequence[Instruction]) -> bool:
    kinds = {each.kind for each in part}
    return "mma" in kinds or ("load" in kinds and "store" not in kinds)


def beside(code: Sequence[Instruction], loop: Loop, path: Sequence[int]) -> list[Instruction]:
    """What a tile costs beside its steps: its prologue and its epilogue, each instruction once.

    That is the rest of the loop over tiles or, where every tile has a program of its own, of the kernel. Where there
    are stores in the loop that multiplies, the compiler has made one of steps and tiles.
    """
    if count(code[loop.head : loop.end + 1], "store"):
        tiles, steps = loop, set(path)
    else:
        around = [other for other in loops(code) if loop.within(other)]
        tiles = min(around, key=lambda other: other.end - other.head, default=Loop(0, len(code) - 1))
        steps = set(range(loop.head, loop.end + 1))
    return [code[place] for place in range(tiles.head, tiles.end + 1) if place not in steps]


def count(code: Sequence[Instruction], kind: Kind) -> int:
    """How many instructions are of that kind."""
    return sum(each.kind == kind for each in code)
