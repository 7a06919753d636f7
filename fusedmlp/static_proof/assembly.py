"""Instructions of a listing, with their kinds and the branches between them: SASS, PTX, and AMD's assembly.

Sources: NVIDIA, "CUDA Binary Utilities" (what nvdisasm prints, and its tables of instructions) and "PTX ISA"; AMD, "CDNA
3 ISA"; LLVM, "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

# Loads are of operands; stores to global memory, reductions among them; waits for copies and MMAs; barriers of blocks.
Kind = Literal["mma", "load", "store", "wait", "barrier"]
_Branch = Callable[[str, str], tuple[str, bool] | None]  # of opcode and operands: label, and whether it is conditional

_LABEL = re.compile(r"\s*([.$]?\w+):")
_SASS_TARGET = re.compile(r"(.*?)`\(([^)]+)\)")


class Instruction(NamedTuple):
    """One of a listing; `target` is the place in the listing that it branches to."""

    opcode: str
    operands: str = ""
    kind: Kind | None = None
    target: int | None = None
    conditional: bool = False


class _Language(NamedTuple):
    line: re.Pattern[str]  # finds guard, opcode and operands
    kinds: dict[Kind, re.Pattern[str]]  # by how instructions begin


_SASS = _Language(
    re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);"),
    {
        "mma": re.compile(r"(?:UTC[A-Z]+|[A-Z]G|[HQID])MMA\b"),
        "load": re.compile(r"UTMALDG|LDGSTS"),
        "store": re.compile(r"UTMASTG|UTMAREDG|STG|ST\.|REDG?\."),
        "wait": re.compile(r"DEPBAR\.LE SB0|WARPGROUP\.DEPBAR|SYNCS\.PHASECHK"),
        "barrier": re.compile(r"BAR\."),
    },
)
_PTX = _Language(
    re.compile(r"\s*(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)([^;]*)"),
    {"mma": re.compile(r"wgmma\.mma_async|tcgen05\.mma\.|mma\.sync"), "wait": re.compile(r"mbarrier\.try_wait")},
)
_GCN = _Language(
    re.compile(r"\s+()([a-z]\w*)([^;]*)"),
    {
        "mma": re.compile(r"v_s?mf(?:ma|mac)_"),
        "load": re.compile(r"(?:buffer|global)_load"),
        "store": re.compile(r"(?:buffer|global)_(?:store|atomic)"),
        "wait": re.compile(r"s_wait"),
        "barrier": re.compile(r"s_barrier"),
    },
)


def sass(listing: str) -> list[Instruction]:
    """What `nvdisasm -c` prints. A branch is conditional by its guard or by a predicate before its target."""

    def branch(opcode: str, operands: str) -> tuple[str, bool] | None:
        # Where a warp's threads have diverged BRA.DIV goes, and no warp of these kernels needs to.
        if not opcode.startswith("BRA") or opcode == "BRA.DIV" or not (found := _SASS_TARGET.match(operands)):
            return None
        return found[2], bool(found[1].strip())

    return _read(listing, _SASS, branch)


def ptx(source: str) -> list[Instruction]:
    """PTX as LLVM prints it. Branches of inline assembly, whose labels are its own, are none here: they wait."""

    def branch(opcode: str, operands: str) -> tuple[str, bool] | None:
        return (operands, False) if opcode in ("bra", "bra.uni") and operands.startswith("$") else None

    return _read(source, _PTX, branch)


def gcn(source: str) -> list[Instruction]:
    """AMD's assembly as LLVM prints it."""

    def branch(opcode: str, operands: str) -> tuple[str, bool] | None:
        return (operands, opcode != "s_branch") if opcode.startswith(("s_branch", "s_cbranch")) else None

    return _read(source, _GCN, branch)


def _read(listing: str, language: _Language, branch: _Branch) -> list[Instruction]:
    labels: dict[str, int] = {}
    instructions: list[tuple[Instruction, str | None]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := language.line.match(line.split("//")[0]):
            guard, opcode, operands = (group or "" for group in found.groups())
            operands = operands.strip()
            text = f"{opcode} {operands}"
            kind = next((kind for kind, pattern in language.kinds.items() if pattern.match(text)), None)
            to, conditional = branch(opcode, operands) or (None, False)
            instructions.append((Instruction(opcode, operands, kind, None, bool(guard) or conditional), to))
    return [each if to is None else each._replace(target=labels.get(to)) for each, to in instructions]
