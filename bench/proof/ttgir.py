"""Loops that multiply in Triton's own IR, TTGIR, in which neither LLVM nor ptxas has unrolled them.

Sources: MLIR's printed form, in which a region begins with `{` at the end of a line and ends with `}` at the start of
one; Triton, `TritonGPUAttrDefs.td`, `TritonNvidiaGPUAttrDefs.td` (layouts of accumulators).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Results, then the first operands; the third is the accumulator.
_DOT = re.compile(r"(?:(%\w+) = )?(?:tt\.dot(?:_scaled)?|ttng\.(?:warp_group_dot|tc_gen5_mma(?:_scaled)?)) (%.*)")
_WAIT = re.compile(r"(%\w+)(:\d+)? = ttng\.warp_group_dot_wait (%[\w#]+)")
_LEFT = re.compile(r"<\d+x(\d+)x[a-z]+(\d+)")  # columns, bits of an element
_ACCUMULATOR = re.compile(r"<(\d+)x(\d+)x[a-z]+\d+, (#(?:mma|tmem)\d*)\b")
_LAYOUT = re.compile(r"^(#\w+) = #\w+\.(?:nvidia_mma|tensor_memory_encoding)<(.*)>", re.MULTILINE)
_FIELD = re.compile(r"(\w+) = \[?(\d+(?:, \d+)*)")
_LOOP = re.compile(r"\bscf\.(?:for|while)\b|^\} do \{")
_DEPTH = 256  # bits of an operand along the reduction that an MMA multiplies: 16 elements of bf16
_WORKERS, _NO_LOOP = -1, -2


class Steps(NamedTuple):
    """Loops that multiply, of which the innermost one with the most MMAs has the steps.

    Warps of a warp-specialized kernel that are not the default ones have a loop around their partitions.
    """

    mma: int  # of a warp in a turn of that loop
    dots: int  # that add to one accumulator in a turn; more than one if Triton has unrolled a loop
    loops: int  # how many loops have MMAs in them


def steps(asm: Mapping[str, str]) -> Steps:
    """Read what Triton has kept of a compilation: `ttgir` and, as TTGIR may have a dot in parts, `ttir`.

    The loops are those that `loops.multiplying` finds in PTX if LLVM does not unroll them.
    """
    layouts = {name: _fields(text) for name, text in _LAYOUT.findall(asm["ttgir"])}
    products: Counter[int] = Counter()
    outer = {_WORKERS}
    for loops, line in _in_loops(asm["ttgir"]):
        if _DOT.search(line):
            outer.update(loops[:-1])
            products.update(dict.fromkeys(loops, _mma(line, layouts)))
    mma = max((mma for loop, mma in products.items() if loop not in outer), default=0)
    return Steps(mma, _on_one_accumulator(asm.get("ttir", asm["ttgir"])), len(+products))


def _in_loops(source: str) -> Iterator[tuple[list[int], str]]:
    """Lines in loops, each with the numbers of the loops around it."""
    regions: list[int] = []  # the number of the line at which a loop begins, or another
    for number, line in enumerate(map(str.strip, source.splitlines())):
        if loops := [region for region in regions if region != _NO_LOOP]:
            yield loops, line
        if line.startswith("}") and regions:
            regions.pop()
        if line.endswith("{"):
            is_partition = line.startswith("partition")
            regions.append(number if _LOOP.search(line) else _WORKERS if is_partition else _NO_LOOP)


def _on_one_accumulator(source: str) -> int:
    dots: dict[tuple[int, str], int] = {}  # by loop and accumulator
    for (*_, loop), line in _in_loops(source):
        if dot := _DOT.search(line):
            before = re.split(r"[\[ ]", dot[2].split(", ")[2])[0]
            dots[loop, dot[1] or before] = 1 + dots.get((loop, before), 0)
        elif wait := _WAIT.search(line):
            dots[loop, f"{wait[1]}#0" if wait[2] else wait[1]] = dots.get((loop, wait[3]), 0)
    return max(dots.values(), default=0)


def _fields(layout: str) -> dict[str, list[int]]:
    return {name: [int(each) for each in numbers.split(", ")] for name, numbers in _FIELD.findall(layout)}


def _mma(dot: str, layouts: dict[str, dict[str, list[int]]]) -> int:
    """Instructions of each warp, or of the one that multiplies in tensor memory; none if a dot is made of FMAs."""
    left, accumulators = _LEFT.search(dot), _ACCUMULATOR.findall(dot)
    if not left or not accumulators:
        return 0
    rows, columns, name = accumulators[-1]
    layout, sizes = layouts[name], (int(rows), int(columns), int(left[1]) * int(left[2]))
    if "blockM" in layout:
        tile = (*layout["blockM"], *layout["blockN"])
    else:
        tile = tuple(map(math.prod, zip(layout["instrShape"], layout["warpsPerCTA"], strict=False)))
    return math.prod(-(-a // b) for a, b in zip(sizes, (*tile, _DEPTH), strict=True))
