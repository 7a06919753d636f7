"""Instructions of a listing, with their kinds and the branches between them: SASS, PTX, and AMD's assembly; their hash.

Sources: NVIDIA, "CUDA Binary Utilities" (what nvdisasm prints, and tables of instructions) and "PTX ISA"; AMD, "CDNA 3
ISA"; LLVM, "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Literal, NamedTuple, cast

# Loads are of operands; stores to global memory, reductions among them; waits for copies and MMAs; barriers of blocks.
Kind = Literal["mma", "load", "store", "wait", "barrier"]
_Branch = Callable[[str, str], tuple[str, bool] | None]  # (opcode, operands) -> label, whether conditional

_LABEL = re.compile(r"\s*([.$]?\w+):")
# Source files, lines and the labels between them. PTX has its debug sections last, each in braces; in AMD's assembly
# there is metadata between them.
_LINE_INFORMATION = re.compile(r"\.(?:loc|file|cfi_\w+)\b|(?:\$L__|\.L)(?:tmp|func_begin|func_end)\d+:$")
_SECTION = re.compile(r"\.(?:section|text|amdgpu_metadata)\b")
_DEBUG_SECTION = re.compile(r'\.section\s+"?\.debug_')
_SASS_TARGET = re.compile(r"(.*?)(0x[0-9a-f]+)$")


class Instruction(NamedTuple):
    """An instruction of a listing; `target` is the index in the listing of the instruction that it branches to."""

    opcode: str
    operands: str = ""
    kind: Kind | None = None
    target: int | None = None
    conditional: bool = False


class _Language(NamedTuple):
    line: re.Pattern[str]  # groups: address (empty if lines have none), guard, opcode, operands
    kind: re.Pattern[str]  # a group for each kind, which matches the beginnings of its instructions


_SASS = _Language(
    # CUDA 12.8's nvdisasm ends a line of sm_120 with what an instruction waits for (`&`, `?`), not with `;`.
    re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;&?]*)"),
    re.compile(
        r"(?P<mma>(?:UTC[A-Z]+|[A-Z]G|[HQID])MMA\b)|(?P<load>UTMALDG|LDGSTS)"
        r"|(?P<store>UTMASTG|UTMAREDG|STG|ST\.|REDG?\.)"
        r"|(?P<wait>DEPBAR\.LE SB0|WARPGROUP\.DEPBAR|SYNCS\.PHASECHK)|(?P<barrier>BAR\.)"
    ),
)
_PTX = _Language(
    re.compile(r"\s*()(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)([^;]*)"),
    re.compile(r"(?P<mma>wgmma\.mma_async|tcgen05\.mma\.|mma\.sync)|(?P<wait>mbarrier\.try_wait)"),
)
_GCN = _Language(
    re.compile(r"\s+()()([a-z]\w*)([^;]*)"),
    re.compile(
        r"(?P<mma>v_s?mf(?:ma|mac)_)|(?P<load>(?:buffer|global)_load)|(?P<store>(?:buffer|global)_(?:store|atomic))"
        r"|(?P<wait>s_wait)|(?P<barrier>s_barrier)"
    ),
)


def sass(listing: str) -> list[Instruction]:
    """Read SASS as nvdisasm prints it. A branch is conditional by its guard or by a predicate before its target."""

    def branch(opcode: str, operands: str) -> tuple[str, bool] | None:
        # BRA.DIV branches if a warp's threads have diverged, which those of these kernels do not.
        if not opcode.startswith("BRA") or opcode == "BRA.DIV" or not (found := _SASS_TARGET.match(operands)):
            return None
        return found[2], bool(found[1].strip())

    return _read(listing, _SASS, branch)


def ptx(source: str) -> list[Instruction]:
    """Read PTX as LLVM prints it, without the branches of inline assembly, which repeat a wait at labels of its own."""

    def branch(opcode: str, operands: str) -> tuple[str, bool] | None:
        return (operands, False) if opcode in ("bra", "bra.uni") and operands.startswith("$") else None

    return _read(source, _PTX, branch)


def gcn(source: str) -> list[Instruction]:
    """Read AMD's assembly as LLVM prints it."""

    def branch(opcode: str, operands: str) -> tuple[str, bool] | None:
        return (operands, opcode != "s_branch") if opcode.startswith(("s_branch", "s_cbranch")) else None

    return _read(source, _GCN, branch)


def hash_of(source: str, *, is_amd: bool) -> str:
    """The first 16 hex digits of the SHA-256 of PTX, or of AMD's assembly, without comments and line information."""
    code, skipping = [], False
    for each in source.splitlines():
        line = each.split(";" if is_amd else "//")[0].strip()
        if _SECTION.match(line):
            skipping = _DEBUG_SECTION.match(line) is not None
        if line and not skipping and not _LINE_INFORMATION.match(line):
            code.append(line)
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def _read(listing: str, language: _Language, branch: _Branch) -> list[Instruction]:
    labels: dict[str, int] = {}
    instructions: list[tuple[Instruction, str | None]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := language.line.match(line.split("//")[0]):
            address, guard, opcode, operands = ((group or "").strip() for group in found.groups())
            if address:
                labels[f"{int(address, 16):#x}"] = len(instructions)
            of_kind = language.kind.match(f"{opcode} {operands}")
            kind = cast("Kind | None", of_kind and of_kind.lastgroup)
            to, conditional = branch(opcode, operands) or (None, False)
            instructions.append((Instruction(opcode, operands, kind, None, bool(guard) or conditional), to))
    return [each if to is None else each._replace(target=labels.get(to)) for each, to in instructions]
