"""The hash of a kernel's code, and where its SASS spills.

Sources: NVIDIA, "CUDA Binary Utilities" (what nvdisasm prints, and tables of instructions) and "PTX ISA"; LLVM, "User
Guide for AMDGPU Backend".
"""

from __future__ import annotations

import hashlib
import re

# Source files, lines and the labels between them. PTX has its debug sections last, each in braces; in AMD's assembly
# there is metadata between them.
_LINE_INFORMATION = re.compile(r"\.(?:loc|file|cfi_\w+)\b|(?:\$L__|\.L)(?:tmp|func_begin|func_end)\d+:$")
_SECTION = re.compile(r"\.(?:section|text|amdgpu_metadata)\b")
_DEBUG_SECTION = re.compile(r'\.section\s+"?\.debug_')
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;&?]*)")
_MMA = re.compile(r"UTC[A-Z]+MMA\b|[A-Z]GMMA\b|[HQID]MMA\b")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


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


def spills_in_a_step(sass: str) -> bool:
    """Look for loads and stores of spilled registers in the innermost loops with MMAs, of SASS as cuobjdump prints it.

    True if no loop has MMAs: then nothing separates a step from the rest. A loop ends with a conditional branch to its
    head; unconditional ones come back from code that compilers set apart, such as a wait's second try.
    """
    code = [found.groups() for line in sass.splitlines() if (found := _INSTRUCTION.match(line))]
    mmas = [int(address, 16) for address, _, opcode, _ in code if _MMA.match(opcode)]
    loops = set()
    for address, guard, opcode, operands in code:
        is_branch = opcode.startswith("BRA") and opcode != "BRA.DIV"
        target = _TARGET.search(operands) if is_branch and (guard or "," in operands) else None
        start, end = int(target[1], 16) if target else 0, int(address, 16)
        if target and any(start <= mma <= end for mma in mmas):
            loops.add((start, end))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    spills = [int(address, 16) for address, _, opcode, _ in code if opcode.startswith(("LDL", "STL"))]
    return not inner or any(start <= spill <= end for start, end in inner for spill in spills)
