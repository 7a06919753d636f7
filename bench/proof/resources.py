"""Resources of a compiled kernel, from the compiler's own reports."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from bench.proof.cubin import resource_usage

# Instructions by the name they have in PTX or in AMD's assembly.
_TENSOR_CORE = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\."),
    "tcgen05": re.compile(r"\btcgen05\.mma\."),
    "mma.sync": re.compile(r"(?<![.\w])mma\.sync\."),
    "mfma": re.compile(r"\bv_s?mf(?:ma|mac)_"),
}
# Those that take a scale for each block of 32 elements of their operands.
_SCALED = re.compile(r"\b(?:mma\.sync|tcgen05\.mma)\.[^\n]*\.block_scale\b|\bv_mfma_scale_")
_TMA = re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\.")
# Read-modify-writes of memory that threads share. PTX: its atomics and reductions, among them TMA's, with the register
# of the old value, if there is one. AMD: those of global memory, and what does more to shared memory than move data.
_UPDATE = re.compile(
    r"(?:^|[\s;{])((?:atom|red|multimem\.(?:ld_)?red\w*|cp\.reduce\.async\.bulk)\.[\w.:]+)[ \t]+(%\w+)?", re.MULTILINE
)
_AMD_UPDATE = re.compile(
    r"^\s*((?:global|flat|buffer|s|s_buffer)_atomic_\w+|ds_(?!read|write|load|store|b?permute|swizzle|nop)\w+)",
    re.MULTILINE,
)
# Sums of integers are the same in any order: of shared memory, in which `tl.histogram` counts.
_INTEGER_SUM = re.compile(r"(?:atom|red)\.(?:\w+\.)*shared(?:::cta)?\.(?:\w+\.)*add\.(?:[us]32|u64)|ds_add_u(?:32|64)")


class Resources(NamedTuple):
    """Resources of one kernel; bytes of one thread for `spill`, of one block for `shared`."""

    registers: int
    spill: int  # local memory, whether registers were spilled into it or an array lies there
    shared: int
    tensor_memory: int  # columns of Blackwell's tensor memory, of which a multiprocessor has 512
    tensor_core: dict[str, int]  # instructions by kind
    tma: int  # instructions
    scaled: int = 0  # those of `tensor_core` that take scales
    updates: tuple[str, ...] = ()  # instructions that update memory, and whose order may show in a result


def source(compiled: Any) -> tuple[str, bool]:
    """The PTX or the assembly of a `CompiledKernel`, and whether it is AMD's."""
    is_amd = "amdgcn" in compiled.asm
    return compiled.asm["amdgcn" if is_amd else "ptx"], is_amd


def of(compiled: Any) -> Resources:
    """Resources of a `CompiledKernel`."""
    assembly, is_amd = source(compiled)
    registers, spill = _amd(assembly) if is_amd else _nvidia(compiled.asm["cubin"])
    found = {kind: len(pattern.findall(assembly)) for kind, pattern in _TENSOR_CORE.items()}
    return Resources(
        registers,
        spill,
        compiled.metadata.shared,
        getattr(compiled.metadata, "tmem_size", None) or 0,
        {kind: count for kind, count in found.items() if count},
        len(_TMA.findall(assembly)),
        len(_SCALED.findall(assembly)),
        updates(assembly, is_amd=is_amd),
    )


def updates(source: str, *, is_amd: bool) -> tuple[str, ...]:
    """The atomics and reductions in PTX or AMD's assembly, each once, but for sums that are the same in any order.

    An integer sum is, unless someone reads the value that it had before: AMD's instructions that return it end with
    `_rtn` and a type; in PTX no other instruction has its register.
    """
    found = [(name, "") for name in _AMD_UPDATE.findall(source)] if is_amd else _UPDATE.findall(source)
    return tuple(
        dict.fromkeys(
            name
            for name, old in found
            if not _INTEGER_SUM.fullmatch(name) or (old and len(re.findall(rf"{old}\b", source)) > 1)
        )
    )


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Spilled registers lie in the stack frame, so STACK counts them, and LOCAL what has no frame."""
    return parse_res_usage(resource_usage(cubin))


def parse_res_usage(report: str) -> tuple[int, int]:
    """`(registers, bytes of local memory)` from `cuobjdump -res-usage`."""
    use = {name: int(_only(rf"\b{name}:(\d+)", report)) for name in ("REG", "STACK", "LOCAL")}
    return use["REG"], use["STACK"] + use["LOCAL"]


def _amd(assembly: str) -> tuple[int, int]:
    """`vgpr_count` includes the accumulation registers; a spilled register is 4 bytes of a thread."""
    use = {
        name: int(_only(rf"^\s+\.{name}:\s+(\d+)", assembly))
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    }
    return use["vgpr_count"], max(4 * use["vgpr_spill_count"], use["private_segment_fixed_size"])


def _only(pattern: str, report: str) -> str:
    found: list[str] = re.findall(pattern, report, re.MULTILINE)
    if len(found) != 1:
        raise RuntimeError(f"compiler report: expected one {pattern}; got {len(found)} in\n{report[:2000]}")
    return found[0]
